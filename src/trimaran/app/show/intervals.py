"""Splits the steps of a run, single ones and blocks, into intervals of about as many steps each."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from trimaran.runs.read.step_index import Extent


def intervals(counts: Sequence[int], number: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, middle) of at most `number` parts of a list, which have about the same sum of `counts`.

    `middle` is the index of the entry in the middle of a part. If all counts are 1, the parts are exact.
    """
    sums = [0, *accumulate(counts)]
    total = sums[-1]
    bounds = [round(part * total / number) for part in range(number + 1)] if total > number else range(total + 1)
    indices = dict.fromkeys(bisect_left(sums, bound) for bound in bounds)
    for begin, end in pairwise(indices):
        yield begin, end, bisect_right(sums, (sums[begin] + sums[end]) // 2) - 1


def interval_means(extents: Sequence[Extent], number: int) -> list[float]:
    """Return at most `number` means of neighbouring values; fewer values stay as they are."""
    return [
        math.fsum(each.total for each in extents[begin:end]) / sum(each.count for each in extents[begin:end])
        for begin, end, _ in intervals([each.count for each in extents], number)
    ]
