"""F077: the memory of a rank grows without bound."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from trimaran.core import Finding, show_bytes, show_seconds
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import samples_by_node
from trimaran.doctor.memory_evidence import largest_holder
from trimaran.doctor.step_breakdown import get_number

WARM_UP_FRACTION = 0.25  # of the points: caches fill, and the first evaluation and checkpoint take place
NUM_WINDOWS = 6
MIN_POINTS = 24
MIN_SECONDS = 100.0
MIN_GROWTH_BYTES = 128 << 20
MIN_GROWTH_FRACTION = 0.01  # of the memory of the node or device
MIN_STEADINESS = 0.4  # the slowest window's growth, as a fraction of the mean; memory that fills a cache slows down
HOST_FIX = (
    "keep no tensor, list or cache that gets longer with every step, and no loss without `.item()` or `.detach()`; "
    "`trimaran profile RUN --memory`, some minutes apart, shows which tensors have become more"
)
LOADER_FIX = "return samples without keeping them: a cache in a data source or its transforms needs a limit"


class MemorySeries(NamedTuple):
    """Bytes over time: of whom, when, how many, and how many there are."""

    holder: str
    seconds: list[float]
    bytes: list[float]
    total: float
    fix: str


class Growth(NamedTuple):
    """Bytes that were added within so many seconds, after the warm-up."""

    bytes: float
    seconds: float


def memory_growth(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for the rank whose memory grows fastest, as a fraction of what there is."""
    found = [(series, growth) for series in _all_series(evidence) if (growth := _growth(series)) is not None]
    if not found:
        return
    series, growth = max(found, key=lambda each: each[1].bytes / each[1].seconds / each[0].total)
    rate = growth.bytes / growth.seconds
    until_full = max(0.0, series.total - series.bytes[-1]) / rate
    snapshots = [each for each in evidence.snapshots if (holder := largest_holder(each)) is not None and holder[1]]
    largest = largest_holder(snapshots[-1]) if snapshots else None
    most = f"; the largest in the newest memory snapshot: {largest[0]}, {show_bytes(largest[1])}" if largest else ""
    yield Finding(
        code="F077",
        severity="warning",
        verdict=f"{series.holder} grows by {show_bytes(3600 * rate)} an hour, from "
        f"{show_bytes(series.bytes[-1] - growth.bytes)} to {show_bytes(series.bytes[-1])} of "
        f"{show_bytes(series.total)}; full in {show_seconds(until_full)}{most}",
        culprit=series.holder,
        evidence={"growth": growth.bytes, "seconds": growth.seconds, "used": series.bytes[-1], "total": series.total},
        fix=series.fix,
        expected_effect="the run does not end when memory is full",
        confidence=0.8,
    )


def _all_series(evidence: Evidence) -> Iterator[MemorySeries]:
    """Yield the memory of each rank and of its loaders on the nodes, and that of rank 0's tensors on its GPU.

    Pages of mapped files do not count: they fill up as data is read, and the kernel takes them back.
    """
    for node, samples in samples_by_node(evidence):
        total = get_number(samples[-1], "ram") or 0.0
        ranks = samples[-1].get("ranks")
        for rank in ranks if isinstance(ranks, dict) else ():
            kinds = (("private", "host memory", HOST_FIX), ("loader_private", "host memory of the loader", LOADER_FIX))
            for key, what, fix in kinds:
                points = [
                    (at, value)
                    for each in samples
                    if (at := get_number(each, "time")) is not None
                    and (value := get_number(each, "ranks", rank, key)) is not None
                ]
                yield MemorySeries(f"{what} of rank {rank} on {node}", *_columns(points), total, fix)
    points = [
        (at, value)
        for each in evidence.steps
        if get_number(each, "memory", "reserved") is not None  # only the CUDA allocator reports it
        and (at := get_number(each, "time")) is not None
        and (value := get_number(each, "memory", "allocated")) is not None
    ]
    totals = [total for each in evidence.steps if (total := get_number(each, "memory", "total")) is not None]
    if points and totals:
        yield MemorySeries("memory of the tensors on the device of rank 0", *_columns(points), totals[-1], HOST_FIX)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [at for at, _ in points], [value for _, value in points]


def _growth(series: MemorySeries) -> Growth | None:
    """Return the growth after the warm-up; None unless it is large and steady.

    The least value of each window is compared: what a step or an evaluation takes for a while is not growth.
    """
    first = int(WARM_UP_FRACTION * len(series.bytes))
    seconds, values = series.seconds[first:], series.bytes[first:]
    if len(series.bytes) < MIN_POINTS or seconds[-1] - seconds[0] < MIN_SECONDS or not series.total:
        return None
    size = len(values) // NUM_WINDOWS
    values = values[-NUM_WINDOWS * size :]
    lows = [min(values[start : start + size]) for start in range(0, len(values), size)]
    increases = [after - before for before, after in pairwise(lows)]
    grown = lows[-1] - lows[0]
    if min(increases) < MIN_STEADINESS * grown / len(increases):
        return None
    if grown < max(MIN_GROWTH_BYTES, MIN_GROWTH_FRACTION * series.total):
        return None
    return Growth(grown, seconds[-size] - seconds[-len(values)])
