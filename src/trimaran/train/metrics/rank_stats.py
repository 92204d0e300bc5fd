"""Compares the measures of all ranks on rank 0, two steps later, and finds outliers."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median, median_low
from typing import Any

MEASURES = ("busy_seconds", "data_seconds", "wait_seconds", "peak_bytes", "tokens")
WAIT_COLUMN = MEASURES.index("wait_seconds")
# Without the wait: a rank that waits long is not at fault.
OUTLIER_MEASURES = {index: name for index, name in enumerate(MEASURES) if index != WAIT_COLUMN}
OUTLIER_FACTOR = 1.2  # times the median
MIN_OUTLIER_STEP_FRACTION = 0.1  # a difference below this fraction of a step is noise
MAX_OUTLIERS = 8  # in a metrics line
MICROSECONDS = 1_000_000  # per second


class RankStats:
    """Compares the ranks on rank 0. Every rank calls every method at every step.

    A rank sends its measures of a step with the counts of a later step, which are all-reduced anyway, in the row of
    that rank; all other rows are 0. Ranks are compared within their pipeline stage (consecutive ranks): the ranks of a
    stage should do the same work.
    """

    def __init__(self, *, rank: int, num_ranks: int, pp: int = 1) -> None:
        self._rank, self._num_ranks, self._stage_ranks = rank, num_ranks, num_ranks // pp
        self._counts = [0] * (1 + num_ranks * len(MEASURES))  # the step, which rank 0 sends, and the rows of all ranks

    @property
    def counts(self) -> Sequence[int]:
        """This rank's last measures as whole numbers, whose sums over all ranks are for `summary`."""
        return self._counts

    def measure(self, step: int, measures: Mapping[str, float]) -> None:
        """Send these measures of `step` from now on."""
        counts = [0] * len(self._counts)
        first = 1 + self._rank * len(MEASURES)
        counts[first : first + len(MEASURES)] = [_to_count(name, measures[name]) for name in MEASURES]
        counts[0] = step if self._rank == 0 else 0
        self._counts = counts

    def summary(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return `summarise_ranks` and its step on rank 0, given the sums of `counts`; else nothing."""
        if self._rank != 0 or not sums or not sums[0]:
            return {}
        return {"step": round(sums[0])} | summarise_ranks(self.table(sums), self._stage_ranks)

    @staticmethod
    def table(sums: Sequence[float]) -> list[list[float]]:
        """Return the measures of every rank, given the sums of `counts`: a row for each rank, in MEASURES order."""
        rows = [sums[first : first + len(MEASURES)] for first in range(1, len(sums), len(MEASURES))]
        return [[_from_count(name, each) for name, each in zip(MEASURES, row, strict=True)] for row in rows]


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


def _to_count(name: str, value: float) -> int:
    """Return the value in whole microseconds, bytes or tokens."""
    return round(value * MICROSECONDS) if name.endswith("_seconds") else round(value)


def _from_count(name: str, count: float) -> float:
    return count / MICROSECONDS if name.endswith("_seconds") else count
