"""What a sink is."""

from typing import Any, Protocol

Line = dict[str, Any]


class Sink(Protocol):
    """Takes the lines of one run as they are written. Any of these may raise: the others go on, and it is told once."""

    name: str

    def step(self, line: Line) -> None:
        """Take a line of `metrics.jsonl`."""

    def event(self, line: Line) -> None:
        """Take a line of `events/rank-N.jsonl`, of any rank."""

    def incident(self, line: Line) -> None:
        """Take a line of `incidents.jsonl`."""

    def sample(self, line: Line) -> None:
        """Take a line of `telemetry/node-N.jsonl`."""

    def close(self) -> None:
        """The run has ended, or another attempt will open a new sink."""
