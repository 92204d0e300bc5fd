"""Fewer points that say the same: what a page can hold of a hundred thousand steps."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

Point = tuple[float, float]
Spread = tuple[float, float, float, float]
"""Where, and the least, the mean and the most of what was there."""

MAX_POINTS = 300


def curve(points: Sequence[Point], *, limit: int = MAX_POINTS) -> dict[str, Any]:
    """Return the finite ones of `points`, which go from left to right, as a page holds them; nothing where none is.

    More than `limit` become as many stretches with the least, the mean and the most of each, so that no extreme is
    lost. `first`, `last`, `least` and `most` are points as they were.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        return {}
    rows = {"points": finite} if len(finite) <= limit else {"spread": _spreads(finite, limit)}
    least, most = min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))
    return rows | {"first": finite[0], "last": finite[-1], "least": least, "most": most}


def _spreads(points: Sequence[Point], limit: int) -> list[Spread]:
    """Return the spread of each of `limit` stretches; the first begins and the last ends where the points do."""
    values = [value for _, value in points]
    found = []
    for begin, end in stretches(len(points), limit):
        inside = values[begin:end]
        where = points[0][0] if begin == 0 else points[-1][0] if end == len(points) else points[(begin + end) // 2][0]
        found.append((where, min(inside), math.fsum(inside) / len(inside), max(inside)))
    return found


def stretches(length: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield where each of at most `number` equal parts of a list begins and ends."""
    bounds = [round(part * length / number) for part in range(number + 1)] if length > number else range(length + 1)
    yield from pairwise(bounds)


def spread(points: Sequence[Point], *, limit: int = MAX_POINTS) -> list[Spread]:
    """Return least, mean and most of what lies close together, over at most `limit` places from first to last."""
    known = sorted(point for point in points if math.isfinite(point[1]))
    if not known:
        return []
    first, last = known[0][0], known[-1][0]
    width = (last - first) / limit or 1.0
    places: dict[int, list[Point]] = {}
    for point in known:
        places.setdefault(min(limit - 1, int((point[0] - first) / width)), []).append(point)
    return [_of(found) for _, found in sorted(places.items())]


def _of(found: list[Point]) -> Spread:
    values = [value for _, value in found]
    where = found[0][0] if len(found) == 1 else math.fsum(at for at, _ in found) / len(found)
    return where, min(values), math.fsum(values) / len(values), max(values)
