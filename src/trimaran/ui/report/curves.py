"""The curves of a run over its steps, downsampled for a page: metrics, phases, the spread over ranks."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trimaran.app import RunState, StepHistory, intervals
from trimaran.core import PHASES
from trimaran.runs import SCALARS, Extent, is_number, join_extents

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
    found = []
    for _, inside in sorted(bins.items()):
        where, values = math.fsum(at for at, _ in inside) / len(inside), [value for _, value in inside]
        found.append((where, min(values), math.fsum(values) / len(values), max(values)))
    return found


Tree = dict[str, Any]
DetailedStep = tuple[int, Tree]
MAX_PHASE_INTERVALS = 240  # of the stacked plot
SPREADS = ("busy_seconds", "wait_seconds", "data_seconds", "peak_bytes", "tokens")
MEMORY = ("allocated", "reserved")


def number(value: object) -> float:
    return float(value) if is_number(value) else math.nan


def tree(value: object) -> Tree:
    return value if isinstance(value, dict) else {}


def curves_of(
    history: StepHistory, evaluations: Sequence[tuple[int, float]], detailed: Sequence[DetailedStep]
) -> dict[str, Tree]:
    found = {name: curve_of_extents(history.extents(name)) for name in SCALARS}
    found["held_out"] = curve([(float(step), loss) for step, loss in evaluations])
    for name in MEMORY:
        points = [(step, number(tree(details.get("memory")).get(name))) for step, details in detailed]
        found[name] = curve(points)
    return {name: each for name, each in found.items() if each}


def phases_of(history: StepHistory) -> Tree:
    """Return the mean seconds of each phase over equal intervals of the run, and the middle step of each interval."""
    rows: list[tuple[int, int, Mapping[str, float]]] = [  # the middle step, the number of steps, the sums
        *(((block.first + block.last) // 2, block.count, block.phases) for block in history.blocks),
        *((step.step, 1, step.phases) for step in history.steps),
    ]
    bounds = list(intervals([count for _, count, _ in rows], MAX_PHASE_INTERVALS))
    means = {
        name: [
            math.fsum([phases.get(name, 0.0) for _, _, phases in rows[begin:end]])
            / sum(count for _, count, _ in rows[begin:end])
            for begin, end, _ in bounds
        ]
        for name in PHASES
    }
    parts = {name: values for name, values in means.items() if any(value > 0 for value in values)}
    return {"steps": [rows[middle][0] for _, _, middle in bounds], "seconds": parts} if parts else {}


def ranks_of(detailed: Sequence[DetailedStep]) -> Tree:
    """Return the spread over ranks: minimum, median and maximum of each quantity by step, and the outliers."""
    spreads: dict[str, list[list[float]]] = {}
    outliers: Counter[tuple[int, str]] = Counter()
    for step, details in detailed:
        ranks = tree(details.get("ranks"))
        at = number(ranks.get("step", step))
        for name in SPREADS:
            values = [number(tree(ranks.get(name)).get(each)) for each in ("min", "median", "max")]
            if all(map(math.isfinite, [at, *values])):
                spreads.setdefault(name, []).append([at, *values])
        found = ranks.get("outliers")
        for each in found if isinstance(found, list) else []:
            if isinstance(tree(each).get("rank"), int):
                outliers[each["rank"], str(each.get("what", ""))] += 1
    rows = [{"rank": rank, "what": what, "times": times} for (rank, what), times in outliers.most_common(8)]
    return {"spreads": spreads, "outliers": rows, "looked": len(detailed)} if spreads else {}


def groups_of(state: RunState) -> list[Tree]:
    return [
        {"name": name} | {key: number(tree(group).get(key)) for key in ("grad_norm", "update_ratio")}
        for name, group in tree(state.latest.get("groups")).items()
    ]
