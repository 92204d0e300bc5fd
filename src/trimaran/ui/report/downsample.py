"""Downsamples curves, so that a page can show a million steps."""

import math
from collections.abc import Sequence
from typing import Any

from trimaran.app.show.intervals import intervals
from trimaran.runs.read.step_index import Extent, join_extents

Point = tuple[float, float]
Spread = tuple[float, float, float, float]
"""Position, minimum, mean and maximum."""

MAX_POINTS = 300


def curve(points: Sequence[Point], *, limit: int = MAX_POINTS) -> dict[str, Any]:
    """Return the finite `points`, which are sorted, for a page; empty if there are none. See `curve_of_extents`."""
    finite = [point for point in points if math.isfinite(point[1])]
    return curve_of_extents([Extent(1, point[1], point, point, point, point) for point in finite], limit=limit)


def curve_of_extents(extents: Sequence[Extent], *, limit: int = MAX_POINTS) -> dict[str, Any]:
    """Return a curve for a page; empty if there are no `extents`, which are those of single steps and of blocks.

    More than `limit` points become `limit` intervals with minimum, mean and maximum, so that no extreme is lost.
    `first`, `last`, `least` and `most` are original points.
    """
    if not extents:
        return {}
    is_exact = len(extents) <= limit and all(each.count == 1 for each in extents)
    rows = {"points": [each.first for each in extents]} if is_exact else {"spread": _spreads(extents, limit)}
    whole = join_extents(extents)
    return rows | {"first": whole.first, "last": whole.last, "least": whole.least, "most": whole.most}


def _spreads(extents: Sequence[Extent], limit: int) -> list[Spread]:
    """Return the spread of each of `limit` intervals; the first and the last are at the first and the last point."""
    found: list[Spread] = []
    for begin, end, middle in intervals([each.count for each in extents], limit):
        inside, centre = extents[begin:end], extents[middle]
        where = (centre.first[0] + centre.last[0]) / 2 if centre.count > 1 else centre.first[0]
        where = extents[0].first[0] if begin == 0 else extents[-1].last[0] if end == len(extents) else where
        low, high = min([each.least[1] for each in inside]), max([each.most[1] for each in inside])
        mean = math.fsum([each.total for each in inside]) / sum([each.count for each in inside])
        found.append((where, low, min(high, max(low, mean)), high))  # the mean of equal values is rounded
    return found


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
