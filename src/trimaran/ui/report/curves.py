"""The curves of a run over its steps, downsampled for a page: metrics, phases, the spread over ranks."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trimaran.app.runs.run_state import RunState
from trimaran.app.runs.step_history import StepHistory
from trimaran.app.show.intervals import intervals
from trimaran.core import PHASES
from trimaran.runs.read.step_index import SCALARS
from trimaran.runs.record_types import is_number
from trimaran.ui.report.downsample import curve, curve_of_extents

Tree = dict[str, Any]
DetailedStep = tuple[int, Tree]
MAX_PHASE_INTERVALS = 240  # of the stacked plot
SPREADS = ("busy_seconds", "wait_seconds", "data_seconds", "peak_bytes", "tokens")
MEMORY = ("allocated", "reserved")


def number(value: object) -> float:
    """Return `value` as a float; NaN if it is not a number."""
    return float(value) if is_number(value) else math.nan


def tree(value: object) -> Tree:
    """Return `value` if it is a dict, else an empty one."""
    return value if isinstance(value, dict) else {}


def curves_of(
    history: StepHistory, evaluations: Sequence[tuple[int, float]], detailed: Sequence[DetailedStep]
) -> dict[str, Tree]:
    """Return every curve over the steps by name, see `downsample.curve`."""
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
    """Return the latest gradient norm and update ratio of each weight group."""
    return [
        {"name": name} | {key: finite_or_none(number(tree(group).get(key))) for key in ("grad_norm", "update_ratio")}
        for name, group in tree(state.latest.get("groups")).items()
    ]


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
