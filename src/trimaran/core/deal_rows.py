"""Deals the rows of a micro-batch to ranks of unequal speed."""

import heapq
from collections.abc import Callable, Sequence

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
