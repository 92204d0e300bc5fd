"""Gathers the measures of all ranks on rank 0, one step later, and finds outliers."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median, median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MEASURES = ("busy_seconds", "data_seconds", "wait_seconds", "peak_bytes", "tokens")
WAIT_COLUMN = MEASURES.index("wait_seconds")
# Without the wait: a rank that waits long is not at fault.
OUTLIER_MEASURES = {index: name for index, name in enumerate(MEASURES) if index != WAIT_COLUMN}
OUTLIER_FACTOR = 1.2  # times the median
MIN_OUTLIER_STEP_FRACTION = 0.1  # a difference below this fraction of a step is noise
MAX_OUTLIERS = 8  # in a metrics line


class RankStats:
    """Gathers the measures of all ranks on rank 0. Every rank calls `exchange` at every step.

    The gather runs between the hosts, asynchronously, and is read when the next one starts. By then every rank has
    taken part in a later step, so it is complete and nothing waits. Ranks are compared within their pipeline stage
    (consecutive ranks): the ranks of a stage should do the same work.
    """

    def __init__(self, *, pp: int = 1) -> None:
        self._rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self._table = torch.zeros(num_ranks, len(MEASURES), dtype=torch.float64)
        self._rows = list(self._table.unbind()) if self._rank == 0 else None
        self._stage_ranks = num_ranks // pp
        self._pending: tuple[int, Tensor, dist.Work] | None = None  # keeps the sent tensor alive

    def exchange(self, step: int, mine: Mapping[str, float]) -> dict[str, Any]:
        """Send this rank's measures of `step`. Return `summarise_ranks` of the last call on rank 0, else nothing."""
        previous = self._previous_summary()
        row = torch.tensor([mine[name] for name in MEASURES], dtype=torch.float64)
        work = dist.gather(row, self._rows, dst=0, async_op=True)
        assert work is not None
        self._pending = (step, row, work)
        return previous

    def _previous_summary(self) -> dict[str, Any]:
        if self._pending is None:
            return {}
        step, _, work = self._pending
        work.wait()
        return {"step": step} | summarise_ranks(self._table.tolist(), self._stage_ranks) if self._rank == 0 else {}


def summarise_ranks(table: Sequence[Sequence[float]], stage_ranks: int) -> dict[str, Any]:
    """Return the minimum, median and maximum of each measure, the rank with the maximum, and the outliers.

    `table` has a row per rank, with MEASURES in their order. `late_seconds` is how much later than rank 0 the slowest
    rank of its stage finished its own work: rank 0 waited for it that long.
    """
    summary: dict[str, Any] = {}
    for name, column in zip(MEASURES, zip(*table, strict=True), strict=True):
        low, middle, high = (_rounded(name, each) for each in (min(column), median(column), max(column)))
        summary[name] = {"min": low, "median": middle, "max": high, "at": column.index(max(column))}
    ready = [busy + data for busy, data, *_ in table[:stage_ranks]]
    summary["late_seconds"] = min(max(ready) - ready[0], table[0][WAIT_COLUMN])
    stages = range(0, len(table), stage_ranks)
    outliers = [each for first in stages for each in _outliers(table[first : first + stage_ranks], first)]
    outliers.sort(key=lambda each: each["value"] / each["median"] if each["median"] else float("inf"), reverse=True)
    return summary | {"outliers": outliers[:MAX_OUTLIERS]}


def _outliers(rows: Sequence[Sequence[float]], first: int) -> Iterator[dict[str, Any]]:
    """Yield the ranks, from rank `first` on, that are far above the median. Of two ranks the median is the lower."""
    step_seconds = median_low([sum(row[: WAIT_COLUMN + 1]) for row in rows])  # busy, data and wait add up to the step
    noise = MIN_OUTLIER_STEP_FRACTION * step_seconds
    for index, name in OUTLIER_MEASURES.items():
        column = [row[index] for row in rows]
        middle = median_low(column)
        limit = max(OUTLIER_FACTOR * middle, middle + noise if name.endswith("_seconds") else 0.0)
        for rank, value in enumerate(column, first):
            if value > limit:
                yield {"rank": rank, "what": name, "value": _rounded(name, value), "median": _rounded(name, middle)}


def _rounded(name: str, value: float) -> float:
    """Return the value rounded to microseconds, or to whole bytes and tokens."""
    return round(value, 6) if name.endswith("_seconds") else round(value)
