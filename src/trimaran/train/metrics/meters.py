"""The metrics of a step besides its time: memory, hardware FLOPs utilisation, and a comparison of the ranks."""

import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from time import monotonic
from typing import Any

import torch

from trimaran.core import DEVICE_TRAITS, Plan, Recipe
from trimaran.machine import CGROUP, total_bytes
from trimaran.runs import Journal, RankTableWriter, count_refused_packets

MEASURES = ("busy_seconds", "data_seconds", "wait_seconds", "peak_bytes", "tokens")
WAIT_COLUMN = MEASURES.index("wait_seconds")
# Without the wait: a rank that waits long is not at fault.
OUTLIER_MEASURES = {index: name for index, name in enumerate(MEASURES) if index != WAIT_COLUMN}
OUTLIER_FACTOR = 1.2  # times the median
MIN_OUTLIER_STEP_FRACTION = 0.1  # a difference below this fraction of a step is noise
MAX_OUTLIERS = 8  # in a metrics line
MICROSECONDS = 1_000_000  # per second
STATM = "/proc/self/statm"
MAX_STATM_BYTES = 256
NUM_FIRST_READS = 20  # of the memory, each at a step; later at most one in READ_SECONDS
READ_SECONDS = 0.1
PAGE_BYTES = resource.getpagesize()


class RankStats:
    """Compares the ranks on rank 0. Every rank calls every method at every step.

    A rank sends its measures of a step with the counts of a later step, which are all-reduced anyway. They are in the
    row of that rank; all other rows are 0. Ranks are compared within their pipeline stage (consecutive ranks): the
    ranks of a stage should do the same work.
    """

    def __init__(self, *, rank: int, num_ranks: int, pp: int = 1) -> None:
        self._rank, self._num_ranks, self._stage_ranks = rank, num_ranks, num_ranks // pp
        # The step, which rank 0 sends, and the rows of all ranks, as whole numbers. Their sums are for `summary`.
        self.counts = [0] * (1 + num_ranks * len(MEASURES))

    def measure(self, step: int, measures: Mapping[str, float]) -> None:
        """Send these measures of `step` from now on, in whole microseconds, bytes or tokens."""
        units = (MICROSECONDS if name.endswith("_seconds") else 1 for name in MEASURES)
        row = [round(measures[name] * unit) for name, unit in zip(MEASURES, units, strict=True)]
        first = 1 + self._rank * len(MEASURES)
        self.counts = [0] * len(self.counts)
        self.counts[first : first + len(MEASURES)] = row
        self.counts[0] = step if self._rank == 0 else 0

    def summary(self, sums: Sequence[float]) -> dict[str, Any]:
        if self._rank != 0 or not sums or not sums[0]:
            return {}
        return {"step": round(sums[0])} | summarise_ranks(self.table(sums), self._stage_ranks)

    @staticmethod
    def table(sums: Sequence[float]) -> list[list[float]]:
        """Return the measures of every rank, given the sums of `counts`: a row for each rank, in MEASURES order."""
        rows = [sums[first : first + len(MEASURES)] for first in range(1, len(sums), len(MEASURES))]
        units = [MICROSECONDS if name.endswith("_seconds") else 1 for name in MEASURES]
        return [[each / unit for each, unit in zip(row, units, strict=True)] for row in rows]


def summarise_ranks(table: Sequence[Sequence[float]], stage_ranks: int) -> dict[str, Any]:
    """Return minimum, median and maximum of each measure, its rank, and the outliers; `table` has a row per rank.

    Rank 0 waited `late_seconds` for the slowest rank of its stage.
    """
    summary: dict[str, Any] = {}
    for name, column in zip(MEASURES, zip(*table, strict=True), strict=True):
        low, middle, high = (_rounded(name, each) for each in (min(column), median(column), max(column)))
        summary[name] = {"min": low, "median": middle, "max": high, "at": column.index(max(column))}
    ready = [busy + data for busy, data, *_ in table[:stage_ranks]]
    summary["late_seconds"] = min(max(ready) - ready[0], table[0][WAIT_COLUMN])
    outliers = []  # ranks that are far above the median of their stage; of two ranks the median is the lower
    for first in range(0, len(table), stage_ranks):
        rows = table[first : first + stage_ranks]
        # Busy, data and wait add up to the step.
        noise = MIN_OUTLIER_STEP_FRACTION * median_low([sum(row[: WAIT_COLUMN + 1]) for row in rows])
        for index, name in OUTLIER_MEASURES.items():
            column = [row[index] for row in rows]
            middle = median_low(column)
            limit = max(OUTLIER_FACTOR * middle, middle + noise if name.endswith("_seconds") else 0.0)
            outliers += [
                {"rank": rank, "what": name, "value": _rounded(name, value), "median": _rounded(name, middle)}
                for rank, value in enumerate(column, first)
                if value > limit
            ]
    outliers.sort(key=lambda each: each["value"] / each["median"] if each["median"] else float("inf"), reverse=True)
    return summary | {"outliers": outliers[:MAX_OUTLIERS]}


def _rounded(name: str, value: float) -> float:
    return round(value, 6) if name.endswith("_seconds") else round(value)


class MemoryMeter:
    """Reads device (on a CPU: host) memory without a sync, at most ten times a second: it takes up to 0.1 ms."""

    def __init__(self, device: torch.device, *, cgroup: Path = CGROUP, now: Callable[[], float] = monotonic) -> None:
        self._device, self._on_gpu = device, DEVICE_TRAITS[device.type].has_own_memory
        self._total = torch.cuda.get_device_properties(device).total_memory if self._on_gpu else total_bytes(cgroup)
        self._now, self._num_reads, self._due = now, 0, 0.0
        self._last: tuple[int, dict[str, Any]] = (0, {})

    def read(self) -> tuple[int, dict[str, Any]]:
        """Return the peak bytes of this rank so far, and the `memory` field of the metrics."""
        now = self._now()
        if self._num_reads < NUM_FIRST_READS or now >= self._due:
            if self._on_gpu:
                stats = torch.cuda.memory_stats_as_nested_dict(self._device)
                peak, memory = _bytes(stats, "allocated_bytes", "peak"), allocator_memory(stats)
            else:
                peak, memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, {}
                with suppress(OSError, ValueError, IndexError):  # not available on this system; training continues
                    memory["allocated"] = resident_bytes()
            self._last = peak, memory | {"total": self._total}
            self._num_reads, self._due = self._num_reads + 1, now + READ_SECONDS
        return self._last


def allocator_memory(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `memory` field of the metrics from the statistics of torch's CUDA allocator."""
    reserved = _bytes(stats, "reserved_bytes")
    return {
        "allocated": _bytes(stats, "allocated_bytes"),
        "reserved": reserved,
        "fragmentation": _bytes(stats, "inactive_split_bytes") / reserved if reserved else 0.0,
        "retries": stats.get("num_alloc_retries", 0),
        "ooms": stats.get("num_ooms", 0),
    }


def _bytes(stats: Mapping[str, Any], name: str, when: str = "current") -> int:
    return stats.get(name, {}).get("all", {}).get(when, 0)


def resident_bytes() -> int:
    """Return the resident memory of this process. A `Path` takes five times as long, and psutil longer still."""
    fd = os.open(STATM, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(fd, MAX_STATM_BYTES).split()[1]) * PAGE_BYTES
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meters:
    """Reads the meters of a step, once the seconds of its phases are known. Every rank reads every step."""

    plan: Plan
    memory: MemoryMeter
    rank_stats: RankStats | None = None  # None with a single rank
    rank_table: RankTableWriter | None = None  # on rank 0 of several
    lr_factors: Mapping[str, float]  # of each tower; empty if all have the same learning rate

    @property
    def rank_counts(self) -> Sequence[int]:
        """What this rank sends to all ranks with the next step; nothing from a single rank."""
        return () if self.rank_stats is None else self.rank_stats.counts

    def read(
        self, step: int, *, lr: float, tokens: int, phases: Mapping[str, float], rank_sums: Sequence[float] = ()
    ) -> tuple[int, dict[str, Any]]:
        """Return this rank's peak memory, and the fields that the meters add to the metrics line of the step.

        `tokens` is the number that this rank has loaded. `rank_sums` are the sums of the `rank_counts` that were sent
        with this step. So the comparison of the ranks, and how long rank 0 waited for the slowest, are of two steps
        before.
        """
        peak, memory = self.memory.read()
        details: dict[str, Any] = {"memory": memory, "waits": wait_phases(phases, 0.0)}
        if self.lr_factors:
            details["lrs"] = {tower: lr * factor for tower, factor in self.lr_factors.items()}
        if hfu := utilisation(self.plan, sum(phases.values()), repeated=True):
            details["hfu"] = hfu
        if self.rank_stats is not None:
            self.rank_stats.measure(step, rank_measures(phases, peak=peak, tokens=tokens))
            if ranks := self.rank_stats.summary(rank_sums):
                details |= {"waits": wait_phases(phases, ranks.pop("late_seconds")), "ranks": ranks}
                if self.rank_table is not None and self.rank_table.is_due:
                    self.rank_table.write(ranks["step"], MEASURES, self.rank_stats.table(rank_sums))
        return peak, details


def utilisation(plan: Plan, seconds: float, *, repeated: bool = False) -> float:
    """Return the FLOPs utilisation of a step, with the `repeated` ones that of the hardware; 0 if no peak is known."""
    prediction = plan.prediction
    if not prediction or not prediction.mfu_is_known or not prediction.device_peak_flops:
        return 0.0
    flops = prediction.flops_per_step + (prediction.repeated_flops if repeated else 0)
    return flops / (seconds * prediction.device_peak_flops * plan.mesh.world_size)


def lr_factors(recipe: Recipe, towers: Iterable[str]) -> dict[str, float]:
    """Return each trained tower's learning rate as a factor of the schedule's; empty if no tower has its own."""
    sections, lr = recipe.train.optimizer.towers, recipe.train.lr
    if not any(each.lr is not None for each in sections.values()):
        return {}
    trained = [tower for tower in towers if tower not in recipe.model.freeze]
    tower_lrs = {tower: sections[tower].lr for tower in trained if tower in sections}
    return {tower: (tower_lrs.get(tower) or lr) / lr for tower in trained}


def wait_phases(phases: Mapping[str, float], late: float) -> dict[str, float]:
    """Return the seconds that rank 0 waited in a step, by cause; the slowest rank was `late` seconds behind it."""
    straggler = min(late, phases["comm"])
    return {"data": phases["data"], "comm": phases["comm"] - straggler, "straggler": straggler}


def rank_measures(phases: Mapping[str, float], *, peak: int, tokens: int) -> dict[str, float]:
    """Return the measures that a rank sends to rank 0. Busy, data and wait seconds add up to the step."""
    wait, data = phases["comm"], phases["data"]
    return {
        "busy_seconds": sum(phases.values()) - wait - data,
        "data_seconds": data,
        "wait_seconds": wait,
        "peak_bytes": peak,
        "tokens": tokens,
    }


CHECK_SECONDS = 5.0
MIN_REFUSED_PACKETS = 100  # fewer are a port scan, or one program that tries in vain
REPORT_FACTOR = 10  # report again when there are this many times as many
MAX_DESCRIPTOR_FRACTION = 0.8  # of the limit


class ConnectionWatch:
    """Writes a `connections` event when strangers flood the rank's ports, or when it runs out of descriptors."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._due = 0.0
        self._next_refused = MIN_REFUSED_PACKETS
        self._few_descriptors = False

    def check(self, step: int) -> None:
        """Look at most every 5 seconds; a look takes a millisecond or two."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + CHECK_SECONDS
        refused, used = count_refused_packets(), len(os.listdir("/proc/self/fd"))
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        are_few = limit != resource.RLIM_INFINITY and used > MAX_DESCRIPTOR_FRACTION * limit
        if refused >= self._next_refused or (are_few and not self._few_descriptors):
            self._journal.event("connections", step=step, refused=refused, descriptors=used, limit=limit)
        if refused >= self._next_refused:
            self._next_refused = REPORT_FACTOR * refused
        self._few_descriptors = are_few
