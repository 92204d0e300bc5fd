"""Downsamples curves, so that a page can show a hundred thousand steps."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

Point = tuple[float, float]
Spread = tuple[float, float, float, float]
"""Position, minimum, mean and maximum."""

MAX_POINTS = 300


def curve(points: Sequence[Point], *, limit: int = MAX_POINTS) -> dict[str, Any]:
    """Return the finite `points`, which are sorted, for a page; empty if there are none.

    More than `limit` points become `limit` intervals with minimum, mean and maximum, so that no extreme is lost.
    `first`, `last`, `least` and `most` are original points.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        return {}
    rows = {"points": finite} if len(finite) <= limit else {"spread": _spreads(finite, limit)}
    least, most = min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))
    return rows | {"first": finite[0], "last": finite[-1], "least": least, "most": most}


def _spreads(points: Sequence[Point], limit: int) -> list[Spread]:
    """Return the spread of each of `limit` intervals; the first and the last are at the first and the last point."""
    values = [value for _, value in points]
    found = []
    for begin, end in intervals(len(points), limit):
        inside = values[begin:end]
        where = points[0][0] if begin == 0 else points[-1][0] if end == len(points) else points[(begin + end) // 2][0]
        found.append((where, min(inside), math.fsum(inside) / len(inside), max(inside)))
    return found


def intervals(length: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each of at most `number` equal parts of a list."""
    bounds = [round(part * length / number) for part in range(number + 1)] if length > number else range(length + 1)
    yield from pairwise(bounds)


def spread(points: Sequence[Point], *, limit: int = MAX_POINTS) -> list[Spread]:
    """Return minimum, mean and maximum of the points in each of at most `limit` equal bins from first to last."""
    finite = sorted(point for point in points if math.isfinite(point[1]))
    if not finite:
        return []
    first, last = finite[0][0], finite[-1][0]
    width = (last - first) / limit or 1.0
    bins: dict[int, list[Point]] = {}
    for point in finite:
        bins.setdefault(min(limit - 1, int((point[0] - first) / width)), []).append(point)
    return [_bin_spread(found) for _, found in sorted(bins.items())]


def _bin_spread(points: list[Point]) -> Spread:
    values = [value for _, value in points]
    where = points[0][0] if len(points) == 1 else math.fsum(at for at, _ in points) / len(points)
    return where, min(values), math.fsum(values) / len(values), max(values)
