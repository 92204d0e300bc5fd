"""Prometheus series of nodes, GPUs and rank processes: the last sample of each node, built at each scrape."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from trimaran.runs.sinks.metric_catalogue import MAX_INDIVIDUAL_SERIES
from trimaran.runs.sinks.series import Series
from trimaran.runs.sinks.sink import Line

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
        for name, key, fixed in RANK_METRICS:
            self._set(name, ("rank",), _values(ranks, key), fixed)
        for name, key, fixed in NODE_METRICS:
            self._set(name, ("node",), _values({(node,): line for node, line in lines.items()}, key), fixed)
        for name, key, fixed in GPU_METRICS:
            self._set(name, ("node", "gpu", "uuid"), _values(gpus, key), fixed)
        self._throttled(gpus)

    def _set(self, name: str, labels: Labels, values: Mapping[Labels, float], fixed: Mapping[str, str]) -> None:
        for label_values, stat, value in summarise_many(values, most=MAX_INDIVIDUAL_SERIES, width=len(labels)):
            self._series.set(name, value, **dict(zip(labels, label_values, strict=True)), stat=stat, **fixed)

    def _throttled(self, gpus: Samples) -> None:
        """Count the throttled GPUs by reason; the reason "none" counts the others, so that a series always exists."""
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


def _values(samples: Samples, key: str) -> dict[Labels, float]:
    return {labels: each[key] for labels, each in samples.items() if isinstance(each.get(key), int | float)}
