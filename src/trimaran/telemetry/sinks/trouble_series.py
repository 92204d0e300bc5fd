"""What went wrong, and what was kept of the state, as series."""

from collections import deque
from typing import get_args

from trimaran.core import Cause
from trimaran.telemetry.sinks.series import Series
from trimaran.telemetry.sinks.sink import Line

STARTED_AGAIN = ("restarted", "replanned", "resized")
COSTLY = (*STARTED_AGAIN, "rewound", "stopped")  # steps were lost, or the run was
SEVERITIES = ("warning", "critical")
SETTLE_SECONDS = 15.0  # by then it is known who did it; an incident about which nothing is done is counted too
RECENT_GAPS = 5


class TroubleSeries:
    """Counts incidents and checkpoints. All causes are there from the start, so that the first one is an increase."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._open: dict[str, Line] = {}
        self._counted: set[str] = set()
        self._restarted: set[str] = set()
        self._last_checkpoint = 0.0
        self._gaps: deque[float] = deque(maxlen=RECENT_GAPS)
        for cause in get_args(Cause):
            series.add("restarts", 0, cause=cause)
            for severity in SEVERITIES:
                series.add("incidents", 0, kind=cause, severity=severity)
        for name in ("checkpoints", "checkpoint_stall_seconds", "dropped_series"):
            series.add(name, 0)

    def incident(self, line: Line) -> None:
        """Take an incident as it is known now: what was said of it first may have been wrong."""
        name, action = line["id"], line.get("action")
        if action in STARTED_AGAIN and name not in self._restarted:
            self._restarted.add(name)
            self._series.add("restarts", cause=_cause(line))
        if name in self._counted:
            return
        self._open[name] = line
        if action is not None:
            self._count(name)

    def settle(self, now: float) -> None:
        """Count the incidents about which nothing was done for a while."""
        for name in [each for each, line in self._open.items() if line.get("time", 0.0) < now - SETTLE_SECONDS]:
            self._count(name)

    def event(self, line: Line) -> None:
        """Take checkpoints; every rank tells of each, and rank 0 is believed."""
        if line.get("rank") != 0:
            return
        if line["kind"] in ("start", "done", "stop"):
            self._last_checkpoint = 0.0  # a pause, and the last checkpoint, are no measure
        if line["kind"] != "checkpoint":
            return
        data, when = line.get("data", {}), line["time"]
        if self._last_checkpoint:
            self._gaps.append(when - self._last_checkpoint)
            self._series.set("checkpoint_interval_seconds", max(self._gaps))
        self._last_checkpoint = when
        self._series.add("checkpoints")
        self._series.add("checkpoint_stall_seconds", data.get("stall_seconds"))
        self._series.set("checkpoint_last_success_timestamp_seconds", when)
        self._series.set("checkpoint_duration_seconds", data.get("seconds"))
        self._series.set("checkpoint_bytes", data.get("bytes"))

    def _count(self, name: str) -> None:
        line = self._open.pop(name)
        self._counted.add(name)
        severity = "critical" if line.get("action") in COSTLY else "warning"
        self._series.add("incidents", kind=_cause(line), severity=severity)


def _cause(line: Line) -> str:
    """Return the cause: a word that we know, whatever the file says."""
    return line["cause"] if line.get("cause") in get_args(Cause) else "unknown"
