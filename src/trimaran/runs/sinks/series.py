"""The Prometheus series of a run: its steps, machines, incidents, decisions and goodput."""

import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family

from trimaran.core import AXES, PHASES, VERSION, WORLD, Cause, DecisionOutcome
from trimaran.runs.read.run_reader import RunReader
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.sinks.metric_catalogue import CATALOGUE, MAX_INDIVIDUAL_SERIES, MAX_SERIES_PER_METRIC, STEP_BUCKETS
from trimaran.runs.sinks.sink import Line

PREFIX = "trimaran_"
_METRIC_CLASSES: dict[str, Any] = {
    "gauge": prometheus_client.Gauge,
    "counter": prometheus_client.Counter,
    "summary": prometheus_client.Summary,
    "histogram": prometheus_client.Histogram,
}


class Series:
    """All metrics of the catalogue for one run. Scrapes run in another thread; the lock keeps lines atomic.

    A metric without a value has no series. `before_scrape` is called with the lock held.
    """

    def __init__(self, run: str) -> None:
        self.run, self.lock = run, threading.RLock()
        self.before_scrape: Callable[[], None] = lambda: None
        self.registry = _Registry(self)
        prometheus_client.disable_created_metrics()
        self._metrics: dict[str, Any] = {}
        for name, metric in CATALOGUE.items():
            more = {"buckets": STEP_BUCKETS} if metric.kind == "histogram" else {}
            kind, labels = _METRIC_CLASSES[metric.kind], ("run", *metric.labels)
            self._metrics[name] = kind(PREFIX + name, metric.meaning, labels, registry=self.registry, **more)
        self._label_values: dict[str, set[tuple[str, ...]]] = {name: set() for name in CATALOGUE}

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """Set the series to `value`. None, which lines have for NaN and Inf, changes nothing."""
        if value is not None and (child := self._child(name, labels)):
            child.set(value)

    def add(self, name: str, value: float | None = 1, **labels: str) -> None:
        if value is not None and value >= 0 and (child := self._child(name, labels)):
            child.inc(value)

    def observe(self, name: str, value: float | None, **labels: str) -> None:
        if value is not None and (child := self._child(name, labels)):
            child.observe(value)

    def clear(self, *names: str) -> None:
        """Remove all series of these metrics."""
        for name in names:
            self._metrics[name].clear()
            self._label_values[name].clear()

    def _child(self, name: str, labels: dict[str, str]) -> Any:
        """Return the series with these labels, or None if the metric already has too many."""
        names = CATALOGUE[name].labels
        values = tuple(labels.get(each, "") for each in names)
        assert labels.keys() <= set(names), f"{name} has no label {sorted(labels.keys() - set(names))}"
        known = self._label_values[name]
        if values not in known:
            if len(known) >= MAX_SERIES_PER_METRIC:
                self.add("dropped_series")
                return None
            known.add(values)
        return self._metrics[name].labels(self.run, *values)


class _Registry(CollectorRegistry):
    def __init__(self, series: Series) -> None:
        super().__init__()
        self._series = series

    def collect(self) -> Iterable[Family]:
        with self._series.lock:
            self._series.before_scrape()
            return list(super().collect())


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


class DecisionSeries:
    """Follows the decisions of a run. Every outcome starts at 0, so that `increase()` sees the first one."""

    def __init__(self, series: Series, run: RunDirectory) -> None:
        self._series, self._reader = series, RunReader(run)
        self._counted: set[tuple[int, str]] = set()
        for outcome in get_args(DecisionOutcome):
            series.add("decisions", 0, outcome=outcome)
        series.set("trial_seconds", 0.0)

    def poll(self) -> None:
        """Show what was decided since the last call. Without a new line it is one system call."""
        new = self._reader.new_decisions()
        for decision in new.values():
            state = decision.id, decision.outcome
            if state not in self._counted:
                self._counted.add(state)
                self._series.add("decisions", outcome=decision.outcome)
            if decision.outcome != "advised":
                self._series.set("decision_expected_gain_ratio", decision.expected.get("gain"))
                self._series.set("decision_measured_gain_ratio", (decision.measured or {}).get("gain"))
        if new:
            spent = sum(each.trial_seconds for each in self._reader.decisions.values())
            self._series.set("trial_seconds", spent)


Labels = tuple[str, ...]
Samples = Mapping[Labels, dict[str, Any]]

MAX_SILENT_SECONDS = 120.0  # a node without samples for this long, while others have some, is not shown
MAX_OUTLIERS = 3
# Each is (metric, key of a sample, fixed labels).
RANK_METRICS = (
    ("rank_cpu_cores", "cpu", {}),
    ("rank_loader_cpu_cores", "loader_cpu", {}),
    ("rank_memory_bytes", "ram", {}),
)
NODE_METRICS = (
    ("node_cpu_ratio", "cpu", {}),
    ("node_memory_bytes", "ram_used", {"kind": "used"}),
    ("node_memory_bytes", "ram", {"kind": "total"}),
    ("node_memory_bytes", "swap_used", {"kind": "swap_used"}),
    ("disk_free_bytes", "disk_free", {}),
    ("node_disk_bytes_per_second", "disk_read", {"direction": "read"}),
    ("node_disk_bytes_per_second", "disk_written", {"direction": "written"}),
    ("node_network_bytes_per_second", "net_received", {"direction": "received"}),
    ("node_network_bytes_per_second", "net_sent", {"direction": "sent"}),
)
GPU_METRICS = (
    ("gpu_utilisation_ratio", "utilisation", {}),
    ("gpu_memory_bytes", "memory_used", {"kind": "used"}),
    ("gpu_memory_bytes", "memory", {"kind": "total"}),
    ("gpu_power_watts", "power", {}),
    ("gpu_power_limit_watts", "power_limit", {}),
    ("gpu_temperature_celsius", "temperature", {}),
    ("gpu_sm_clock_hertz", "sm_clock", {}),
    ("gpu_sm_clock_max_hertz", "sm_clock_max", {}),
    ("gpu_ecc_uncorrected", "ecc_uncorrected", {}),
)
TABLES = (RANK_METRICS, NODE_METRICS, GPU_METRICS)
METRIC_NAMES = sorted({name for table in TABLES for name, _, _ in table} | {"gpu_throttled"})


class MachineSeries:
    """Holds the last sample of each node."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._samples: dict[str, Line] = {}

    def take(self, line: Line) -> None:
        self._samples[str(line.get("node", 0))] = line

    def show(self) -> None:
        """Rebuild the series of all nodes."""
        self._series.clear(*METRIC_NAMES)
        newest = max((line.get("time", 0.0) for line in self._samples.values()), default=0.0)
        oldest = newest - MAX_SILENT_SECONDS
        lines = {node: each for node, each in self._samples.items() if each.get("time", 0.0) > oldest}
        ranks: Samples = {(rank,): each for line in lines.values() for rank, each in line.get("ranks", {}).items()}
        gpus: Samples = {
            (node, str(gpu.get("index", "")), str(gpu.get("uuid", ""))): gpu
            for node, line in lines.items()
            for gpu in line.get("gpus", ())
        }
        nodes: Samples = {(node,): line for node, line in lines.items()}
        for table, samples in zip(TABLES, (ranks, nodes, gpus), strict=True):
            for name, key, fixed in table:
                labels = [each for each in CATALOGUE[name].labels if each != "stat" and each not in fixed]
                values = {own: each[key] for own, each in samples.items() if isinstance(each.get(key), int | float)}
                for own, stat, value in summarise_many(values, most=MAX_INDIVIDUAL_SERIES, width=len(labels)):
                    self._series.set(name, value, **dict(zip(labels, own, strict=True)), stat=stat, **fixed)
        # The reason "none" counts the GPUs that are not throttled, so that a series always exists.
        reasons = [str(reason) for gpu in gpus.values() for reason in gpu.get("throttle") or ["none"]]
        for reason in sorted(set(reasons)):
            self._series.set("gpu_throttled", reasons.count(reason), reason=reason)


def summarise_many(values: Mapping[Labels, float], *, most: int, width: int) -> Iterator[tuple[Labels, str, float]]:
    """Yield (label values, stat, value) of each of `values` with an empty stat, if they are at most `most`.

    Otherwise yield min, median and max with `width` empty labels, and the outliers farthest from the median.
    """
    if len(values) <= most:
        yield from ((labels, "", value) for labels, value in values.items())
        return
    median = statistics.median(values.values())
    no_labels = ("",) * width  # Prometheus treats an empty label like a missing one
    yield from ((no_labels, "min", min(values.values())), (no_labels, "median", median))
    yield no_labels, "max", max(values.values())
    farthest = sorted(values.items(), key=lambda item: (-abs(item[1] - median), item[0]))
    yield from ((labels, "", value) for labels, value in farthest[:MAX_OUTLIERS])


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
MAX_SLOW_RANKS = 8


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
        memory = line.get("memory", {})
        for kind in MEMORY_KINDS:
            series.set("memory_bytes", memory.get(kind), kind=kind)
        series.set("memory_bytes", line.get("peak_bytes"), kind="peak")
        series.set("memory_fragmentation_ratio", memory.get("fragmentation"))
        self._count("allocator_retries", memory.get("retries"))
        self._count("ooms", memory.get("ooms"))
        waits = line.get("waits", {})
        for key, name in WAITS:
            series.observe(name, waits.get(key))
        series.observe("collective_wait_seconds", waits.get("comm"), group="world")
        for axis, seconds in line.get("comm_seconds", {}).items():
            if axis in (*AXES, WORLD):
                series.observe("axis_wait_seconds", seconds, axis=axis)
        if ranks := line.get("ranks"):
            self._ranks(ranks)
        # Most lines have no group metrics; the last values stay then.
        for part, loss in line.get("losses", {}).items():
            series.set("part_loss", loss, part=part)
        for group, lr in line.get("lrs", {}).items():
            series.set("group_learning_rate", lr, group=group)
        for group, metrics in {**line.get("towers", {}), **line.get("groups", {})}.items():
            series.set("group_gradient_norm", metrics.get("grad_norm"), group=group)
            series.set("group_update_ratio", metrics.get("update_ratio"), group=group)

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

    def _count(self, name: str, now: float | None) -> None:
        """Add the increase since the last line; a decrease means that a new process counts from 0."""
        if now is None:
            return
        before = self._counts.get(name, 0.0)
        self._series.add(name, now - before if now >= before else now)
        self._counts[name] = now

    def _ranks(self, ranks: Line) -> None:
        series = self._series
        for name in RANK_STATS:
            for stat in STATS:
                series.set(f"rank_{name}", ranks.get(name, {}).get(stat), stat=stat)
        busy = ranks.get("busy_seconds", {})
        if busy.get("max") and busy.get("median") is not None:
            series.set("straggler_score_ratio", busy["median"] / busy["max"])
        series.clear("rank_outlier_ratio")
        for each in ranks.get("outliers", ())[:MAX_SLOW_RANKS]:
            if each.get("median") and each.get("what") in RANK_STATS:
                ratio = each["value"] / each["median"]
                series.set("rank_outlier_ratio", ratio, rank=str(each["rank"]), what=each["what"])
