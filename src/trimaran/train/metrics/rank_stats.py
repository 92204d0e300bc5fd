"""What every rank measured of a step, told to rank 0 a step later, and who stands out."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median, median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MEASURES = ("busy_seconds", "data_seconds", "wait_seconds", "peak_bytes", "tokens")
WAIT = MEASURES.index("wait_seconds")
STANDS_OUT = {place: name for place, name in enumerate(MEASURES) if place != WAIT}  # who waits long is not at fault
OUTLIER = 1.2  # times the median
WORTH_TELLING = 0.1  # of a step: a difference of fewer seconds is noise
MOST = 8  # outliers in a line of the metrics


class RankStats:
    """Brings the measures of all ranks to rank 0. Every rank calls `exchange` at every step.

    They travel between the hosts, beside the device's work, and are looked at when the next ones leave. By then every
    rank has taken part in a later step, so they have arrived, and nobody waits. The ranks of each of `pp` stages, which
    are neighbours, are to do the same; different stages are not.
    """

    def __init__(self, *, pp: int = 1) -> None:
        self._rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self._table = torch.zeros(num_ranks, len(MEASURES), dtype=torch.float64)
        self._rows = list(self._table.unbind()) if self._rank == 0 else None
        self._stage_ranks = num_ranks // pp
        self._under_way: tuple[int, Tensor, dist.Work] | None = None  # the tensor must live as long as it travels

    def exchange(self, step: int, mine: Mapping[str, float]) -> dict[str, Any]:
        """Send this rank's measures of `step`; return `summary` of what was told before on rank 0, else nothing."""
        told = self._arrived()
        row = torch.tensor([mine[name] for name in MEASURES], dtype=torch.float64)
        work = dist.gather(row, self._rows, dst=0, async_op=True)
        assert work is not None
        self._under_way = (step, row, work)
        return told

    def _arrived(self) -> dict[str, Any]:
        if self._under_way is None:
            return {}
        step, _, work = self._under_way
        work.wait()
        return {"step": step} | summary(self._table.tolist(), self._stage_ranks) if self._rank == 0 else {}


def summary(table: Sequence[Sequence[float]], stage_ranks: int) -> dict[str, Any]:
    """Return the least, the median and the most of each measure, with who has the most, and the outliers.

    `table` has a row for each rank, with MEASURES in their order. `late_seconds` is how much later than rank 0 the last
    of its stage was done with what each does on its own; rank 0 had to wait for it so long.
    """
    told: dict[str, Any] = {}
    for name, column in zip(MEASURES, zip(*table, strict=True), strict=True):
        least, middle, most = (_short(name, each) for each in (min(column), median(column), max(column)))
        told[name] = {"min": least, "median": middle, "max": most, "at": column.index(max(column))}
    ready = [busy + data for busy, data, *_ in table[:stage_ranks]]
    told["late_seconds"] = min(max(ready) - ready[0], table[0][WAIT])
    stages = range(0, len(table), stage_ranks)
    outliers = [each for first in stages for each in _outliers(table[first : first + stage_ranks], first)]
    outliers.sort(key=lambda each: each["value"] / each["median"] if each["median"] else float("inf"), reverse=True)
    return told | {"outliers": outliers[:MOST]}


def _outliers(rows: Sequence[Sequence[float]], first: int) -> Iterator[dict[str, Any]]:
    """Yield who of the ranks from `first` on has much more than their median; of two ranks it is the lesser."""
    noise = WORTH_TELLING * median_low([sum(row[: WAIT + 1]) for row in rows])  # busy, data and wait are a whole step
    for place, name in STANDS_OUT.items():
        column = [row[place] for row in rows]
        middle = median_low(column)
        limit = max(OUTLIER * middle, middle + noise if name.endswith("_seconds") else 0.0)
        for rank, value in enumerate(column, first):
            if value > limit:
                yield {"rank": rank, "what": name, "value": _short(name, value), "median": _short(name, middle)}


def _short(name: str, value: float) -> float:
    """Return the value with the digits that mean something: microseconds, or whole bytes and tokens."""
    return round(value, 6) if name.endswith("_seconds") else round(value)
