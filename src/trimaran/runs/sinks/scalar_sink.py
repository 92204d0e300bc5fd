"""What sinks share that draw a chart for each number of a run."""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

from trimaran.runs.read.ledger import LedgerPoller, time_scalars
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.sinks.sink import Line, ReportedIncidents

MAX_STEPS_PER_SECOND = 20  # logging one takes a chart library up to 0.5 ms, and the sidecar must stay cheap


EXCLUDED_KEYS = {"step", "time", "node", "host"}
MAX_SCALARS_PER_LINE = 512  # each becomes a chart


def scalars(line: Line) -> dict[str, float]:
    """Return the finite numbers of `line`; nested ones are named by their path, such as `memory/allocated`.

    List items with an `index` are named by it, such as `gpus/0/power`; other lists are left out.
    """
    included = {key: value for key, value in line.items() if key not in EXCLUDED_KEYS}
    return dict(islice(_walk(included, ""), MAX_SCALARS_PER_LINE))


def _walk(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        if math.isfinite(value):
            yield path, float(value)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _walk(each, f"{path}/{name}" if path else str(name))
    elif isinstance(value, list):
        for each in value:
            if isinstance(each, dict) and "index" in each:
                others = {key: inner for key, inner in each.items() if key != "index"}
                yield from _walk(others, f"{path}/{each['index']}")


class ScalarSink:
    """Logs steps, at most so many a second, and samples of nodes as scalars, each with the goodput ledger."""

    name = ""

    def __init__(self, run: RunDirectory, *, max_steps_per_second: float = MAX_STEPS_PER_SECOND) -> None:
        self.last_step, self.ledger = 0, LedgerPoller(run)
        self._min_seconds, self._logged = 1.0 / max_steps_per_second, 0.0
        self._held: Line | None = None  # the last step if it came too soon after another
        self._reported = ReportedIncidents(run, self.name)

    def log(self, values: dict[str, float], line: Line) -> None:
        """Log scalars of a line, or of the whole run if it is empty."""
        raise NotImplementedError

    def report(self, incident: Line, what: str) -> None:
        """Report an incident, once; `what` is its text."""
        raise NotImplementedError

    def step(self, line: Line) -> None:
        self.last_step, when = line["step"], line.get("time", 0.0)
        if 0.0 <= when - self._logged < self._min_seconds and "groups" not in line:  # groups are rare
            self._held = line
            return
        self._logged, self._held = when, None
        self.log(scalars(line) | time_scalars(self.ledger.poll()), line)

    def incident(self, line: Line) -> None:
        if line.get("action") and not self._reported.contains(line):
            self.report(line, f"{line.get('cause')}: {line.get('what')}; {line['action']}")
            self._reported.add(line)

    def sample(self, line: Line) -> None:
        node = line.get("node", 0)
        named = {f"node-{node}/{name}": value for name, value in scalars(line).items()}
        self.log(named | time_scalars(self.ledger.poll()), line)

    def log_held(self) -> None:
        if last := self._held:
            self.log(scalars(last), last)
