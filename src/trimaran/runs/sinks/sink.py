"""The interface of a sink."""

from typing import Any, Protocol

Line = dict[str, Any]


class Sink(Protocol):
    """Receives the lines of one run. A method may raise: the error is logged once, and other sinks are not affected."""

    name: str

    def step(self, line: Line) -> None:
        """Receive a line of `metrics.jsonl`."""

    def event(self, line: Line) -> None:
        """Receive a line of `events/rank-N.jsonl`, of any rank."""

    def incident(self, line: Line) -> None:
        """Receive a line of `incidents.jsonl`."""

    def sample(self, line: Line) -> None:
        """Receive a line of `telemetry/node-N.jsonl`."""

    def close(self) -> None:
        """Release resources: the run has ended, or a new sidecar will open a new sink."""
