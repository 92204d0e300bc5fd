"""Prometheus series of training: the lines of `metrics.jsonl` and the events of the ranks."""

from typing import Any

from trimaran.core import AXES, PHASES
from trimaran.core.plan import WORLD
from trimaran.core.version import VERSION
from trimaran.runs.sinks.series import Series
from trimaran.runs.sinks.sink import Line

# (metric, key of a line)
GAUGES = (
    ("step", "step"),
    ("last_step_timestamp_seconds", "time"),
    ("mfu_ratio", "mfu"),
    ("hfu_ratio", "hfu"),
    ("loss", "loss"),
    ("gradient_norm", "grad_norm"),
    ("learning_rate", "lr"),
    ("loss_scale", "loss_scale"),
    ("compression_error_ratio", "compression_error"),
)
RANK_STATS = ("busy_seconds", "data_seconds", "wait_seconds", "peak_bytes")
STATS = ("min", "median", "max")
WAITS = (("data", "data_wait_seconds"), ("straggler", "straggler_wait_seconds"))
MEMORY_KINDS = ("allocated", "reserved", "total")
SKIP_REASONS = ("not_finite", "spike")
MAX_OUTLIERS = 8


class RunSeries:
    """Counts the steps of a run over all its attempts."""

    def __init__(self, series: Series, *, steps: int) -> None:
        self._series = series
        self._highest = 0
        self._counts: dict[str, float] = {}  # values that lines count since the start of their attempt
        self._attempt = -1
        series.set("steps_planned", steps or None)
        series.set("finished", 0)
        for name in ("attempts", "steps", "replayed_steps", "tokens", "samples", "bad_samples", "recompiles"):
            series.add(name, 0)
        for reason in SKIP_REASONS:
            series.add("skipped_steps", 0, reason=reason)

    def step(self, line: Line) -> None:
        series = self._series
        for name, key in GAUGES:
            series.set(name, line.get(key))
        series.add("steps")
        if line["step"] <= self._highest:
            series.add("replayed_steps")
        self._highest = max(self._highest, line["step"])
        series.add("tokens", line.get("tokens"))
        series.add("samples", line.get("samples"))
        series.observe("step_duration_seconds", line.get("step_seconds"))
        series.observe("host_duration_seconds", line.get("host_seconds"))
        for phase, seconds in line.get("phases", {}).items():
            if phase in PHASES:
                series.observe("phase_duration_seconds", seconds, phase=phase)
        self._memory(line)
        self._waits(line)
        self._parts(line)

    def event(self, line: Line) -> None:
        if line.get("rank") != 0:
            return
        series, data = self._series, line.get("data", {})
        match line["kind"]:
            case "start":
                self.start(line.get("attempt", 0), data)
            case "skip":
                is_spike = data.get("loss") is not None and data.get("grad_norm") is not None
                series.add("skipped_steps", reason="spike" if is_spike else "not_finite")
            case "bad_sample":
                series.add("bad_samples")
            case "recompile":
                series.add("recompiles")
            case "done" | "stop":
                series.set("finished", 1)

    def start(self, attempt: int, data: dict[str, Any]) -> None:
        """Set the series of a new attempt; `data` is that of the start event."""
        series = self._series
        series.clear("build_info", "attempt_info")
        series.set("build_info", 1, version=str(data.get("version", VERSION)))
        series.set("attempt_info", 1, attempt=str(attempt), world_size=str(data.get("world_size", "")))
        series.set("finished", 0)
        if attempt != self._attempt:
            series.add("attempts")
        self._attempt = attempt

    def _memory(self, line: Line) -> None:
        memory = line.get("memory", {})
        for kind in MEMORY_KINDS:
            self._series.set("memory_bytes", memory.get(kind), kind=kind)
        self._series.set("memory_bytes", line.get("peak_bytes"), kind="peak")
        self._series.set("memory_fragmentation_ratio", memory.get("fragmentation"))
        self._count("allocator_retries", memory.get("retries"))
        self._count("ooms", memory.get("ooms"))

    def _count(self, name: str, now: float | None) -> None:
        """Add the increase since the last line; a decrease means that a new process counts from 0."""
        if now is None:
            return
        before = self._counts.get(name, 0.0)
        self._series.add(name, now - before if now >= before else now)
        self._counts[name] = now

    def _waits(self, line: Line) -> None:
        series, waits = self._series, line.get("waits", {})
        for key, name in WAITS:
            series.observe(name, waits.get(key))
        series.observe("collective_wait_seconds", waits.get("comm"), group="world")
        for axis, seconds in line.get("comm_seconds", {}).items():
            if axis in (*AXES, WORLD):
                series.observe("axis_wait_seconds", seconds, axis=axis)
        ranks = line.get("ranks")
        if not ranks:
            return
        for name in RANK_STATS:
            for stat in STATS:
                series.set(f"rank_{name}", ranks.get(name, {}).get(stat), stat=stat)
        busy = ranks.get("busy_seconds", {})
        if busy.get("max") and busy.get("median") is not None:
            series.set("straggler_score_ratio", busy["median"] / busy["max"])
        series.clear("rank_outlier_ratio")
        for each in ranks.get("outliers", ())[:MAX_OUTLIERS]:
            if each.get("median") and each.get("what") in RANK_STATS:
                ratio = each["value"] / each["median"]
                series.set("rank_outlier_ratio", ratio, rank=str(each["rank"]), what=each["what"])

    def _parts(self, line: Line) -> None:
        """Set the series by group. Most lines have no group metrics; the last values stay then."""
        series = self._series
        for part, loss in line.get("losses", {}).items():
            series.set("part_loss", loss, part=part)
        for group, lr in line.get("lrs", {}).items():
            series.set("group_learning_rate", lr, group=group)
        for group, metrics in {**line.get("towers", {}), **line.get("groups", {})}.items():
            series.set("group_gradient_norm", metrics.get("grad_norm"), group=group)
            series.set("group_update_ratio", metrics.get("update_ratio"), group=group)
