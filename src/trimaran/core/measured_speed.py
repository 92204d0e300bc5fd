"""The spread of measured speeds, and the rows that ranks of unequal speed get."""

import heapq
import math
from collections.abc import Callable, Sequence
from statistics import median

MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation, of a normal distribution
STANDARD_ERROR_OF_MEDIAN = 1.2533  # relative to that of the mean


def robust_sigma(values: Sequence[float]) -> float:
    """Return the standard deviation of `values`, of which there is at least one."""
    middle = median(values)
    return MAD_TO_SIGMA * median(abs(each - middle) for each in values)


def median_error(values: Sequence[float]) -> float:
    """Return the standard error of the median of `values`, of which there is at least one."""
    return STANDARD_ERROR_OF_MEDIAN * robust_sigma(values) / math.sqrt(len(values))


def relative_error(values: Sequence[float]) -> float:
    """Return the standard error of the median of `values`, relative to it."""
    return median_error(values) / median(values)


RowSeconds = Callable[[int], float]  # from a number of rows to the seconds that a rank takes for them


def deal_rows(total: int, seconds: Sequence[RowSeconds], most: Sequence[int | None] = ()) -> tuple[int, ...] | None:
    """Return the rows of each rank, at least 1, so that the slowest rank takes as little time as possible.

    `seconds` must not fall with the number of rows. `most` is how many rows a rank has memory for; None: any number.
    Returns None if there are fewer rows than ranks, or more than fit. The same input always gets the same answer.
    """
    limits = most or [None] * len(seconds)
    if total < len(seconds) or any(limit is not None and limit < 1 for limit in limits):
        return None
    rows = [1] * len(seconds)
    # The next row goes to the rank that would end it first, so no other deal has a faster slowest rank.
    heap = [(of_rank(2), rank) for rank, of_rank in enumerate(seconds) if limits[rank] != 1]
    heapq.heapify(heap)
    for _ in range(total - len(rows)):
        if not heap:
            return None
        _, rank = heapq.heappop(heap)
        rows[rank] += 1
        if rows[rank] != limits[rank]:
            heapq.heappush(heap, (seconds[rank](rows[rank] + 1), rank))
    return tuple(rows)
