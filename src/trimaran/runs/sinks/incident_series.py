"""Prometheus series of incidents and checkpoints."""

from collections import deque
from typing import get_args

from trimaran.core import Cause
from trimaran.runs.sinks.series import Series
from trimaran.runs.sinks.sink import Line

RESTART_ACTIONS = ("restarted", "replanned", "resized")
CRITICAL_ACTIONS = (*RESTART_ACTIONS, "rewound", "stopped")  # steps or the run were lost
SEVERITIES = ("warning", "critical")
SETTLE_SECONDS = 15.0  # after which the cause is known, and an incident without an action is counted too
RECENT_INTERVALS = 5


class IncidentSeries:
    """Counts incidents and checkpoints. All causes start at 0, so that `increase()` sees the first one."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._open: dict[str, Line] = {}
        self._counted: set[str] = set()
        self._restarted: set[str] = set()
        self._last_checkpoint = 0.0
        self._intervals: deque[float] = deque(maxlen=RECENT_INTERVALS)
        for cause in get_args(Cause):
            series.add("restarts", 0, cause=cause)
            for severity in SEVERITIES:
                series.add("incidents", 0, kind=cause, severity=severity)
        for name in ("checkpoints", "checkpoint_stall_seconds", "dropped_series"):
            series.add(name, 0)

    def incident(self, line: Line) -> None:
        """Receive an incident as known now; its first version may have named another cause."""
        name, action = line["id"], line.get("action")
        if action in RESTART_ACTIONS and name not in self._restarted:
            self._restarted.add(name)
            self._series.add("restarts", cause=_cause(line))
        if name in self._counted:
            return
        self._open[name] = line
        if action is not None:
            self._count(name)

    def settle(self, now: float) -> None:
        """Count the incidents that had no action for `SETTLE_SECONDS`."""
        for name in [each for each, line in self._open.items() if line.get("time", 0.0) < now - SETTLE_SECONDS]:
            self._count(name)

    def event(self, line: Line) -> None:
        """Receive checkpoint events. Every rank writes them; those of rank 0 count."""
        if line.get("rank") != 0:
            return
        if line["kind"] in ("start", "done", "stop"):
            self._last_checkpoint = 0.0  # an interval across a pause or with the final checkpoint does not count
        if line["kind"] != "checkpoint":
            return
        data, when = line.get("data", {}), line["time"]
        if self._last_checkpoint:
            self._intervals.append(when - self._last_checkpoint)
            self._series.set("checkpoint_interval_seconds", max(self._intervals))
        self._last_checkpoint = when
        self._series.add("checkpoints")
        self._series.add("checkpoint_stall_seconds", data.get("stall_seconds"))
        self._series.set("checkpoint_last_success_timestamp_seconds", when)
        self._series.set("checkpoint_duration_seconds", data.get("seconds"))
        self._series.set("checkpoint_bytes", data.get("bytes"))

    def _count(self, name: str) -> None:
        line = self._open.pop(name)
        self._counted.add(name)
        severity = "critical" if line.get("action") in CRITICAL_ACTIONS else "warning"
        self._series.add("incidents", kind=_cause(line), severity=severity)


def _cause(line: Line) -> str:
    """Return the cause; "unknown" if the line has none of ours."""
    return line["cause"] if line.get("cause") in get_args(Cause) else "unknown"
