"""What the machines of a run say of themselves, as series: the last sample of each node, put together at a scrape."""

from collections.abc import Mapping
from typing import Any

from trimaran.telemetry.sinks.metric_catalogue import MOST_EACH
from trimaran.telemetry.sinks.rank_summary import spread
from trimaran.telemetry.sinks.series import Series
from trimaran.telemetry.sinks.sink import Line

Who = tuple[str, ...]
Told = Mapping[Who, dict[str, Any]]
Fixed = Mapping[str, str]

LOST_SECONDS = 120.0  # a node that is silent for this long, while others are not, is shown no more
# Each is (metric, key of a sample, labels that it always has).
OF_RANKS = (
    ("rank_cpu_cores", "cpu", {}),
    ("rank_loader_cpu_cores", "loader_cpu", {}),
    ("rank_memory_bytes", "ram", {}),
)
OF_NODES = (
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
OF_GPUS = (
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
SHOWN = sorted({name for table in (OF_RANKS, OF_NODES, OF_GPUS) for name, _, _ in table} | {"gpu_throttled"})


class MachineSeries:
    """Keeps the last sample of each node."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._samples: dict[str, Line] = {}

    def take(self, line: Line) -> None:
        self._samples[str(line.get("node", 0))] = line

    def show(self) -> None:
        """Set the series of all machines anew."""
        self._series.clear(*SHOWN)
        newest = max((line.get("time", 0.0) for line in self._samples.values()), default=0.0)
        lines = {node: each for node, each in self._samples.items() if each.get("time", 0.0) > newest - LOST_SECONDS}
        ranks: Told = {(rank,): told for line in lines.values() for rank, told in line.get("ranks", {}).items()}
        gpus: Told = {
            (node, str(gpu.get("index", "")), str(gpu.get("uuid", ""))): gpu
            for node, line in lines.items()
            for gpu in line.get("gpus", ())
        }
        for name, key, fixed in OF_RANKS:
            self._spread(name, ("rank",), _values(ranks, key), fixed)
        for name, key, fixed in OF_NODES:
            self._spread(name, ("node",), _values({(node,): line for node, line in lines.items()}, key), fixed)
        for name, key, fixed in OF_GPUS:
            self._spread(name, ("node", "gpu", "uuid"), _values(gpus, key), fixed)
        self._throttled(gpus)

    def _spread(self, name: str, labels: Who, values: Mapping[Who, float], fixed: Fixed) -> None:
        for who, stat, value in spread(values, most=MOST_EACH, width=len(labels)):
            self._series.set(name, value, **dict(zip(labels, who, strict=True)), stat=stat, **fixed)

    def _throttled(self, gpus: Told) -> None:
        """Count the GPUs that are held down, by reason; none is said as "none", so that there is always a series."""
        reasons = [str(reason) for gpu in gpus.values() for reason in gpu.get("throttle") or ["none"]]
        for reason in sorted(set(reasons)):
            self._series.set("gpu_throttled", reasons.count(reason), reason=reason)


def _values(told: Told, key: str) -> dict[Who, float]:
    return {who: each[key] for who, each in told.items() if isinstance(each.get(key), int | float)}
