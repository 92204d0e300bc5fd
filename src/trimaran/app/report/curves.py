"""The curves of a run over its steps, downsampled for a page: metrics, phases, the spread over ranks."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from trimaran.app.report.downsample import curve, intervals
from trimaran.app.views.run_state import RunState
from trimaran.core import PHASES, StepMetrics

Tree = dict[str, Any]
MAX_PHASE_INTERVALS = 240  # of the stacked plot
SPREADS = ("busy_seconds", "wait_seconds", "data_seconds", "peak_bytes", "tokens")
SCALARS: dict[str, Callable[[StepMetrics], float]] = {
    "loss": lambda step: step.loss,
    "grad_norm": lambda step: step.grad_norm,
    "lr": lambda step: step.lr,
    "tokens_per_second": lambda step: step.tokens_per_second if step.step_seconds > 0 else math.nan,
    "step_seconds": lambda step: step.step_seconds,
    "peak_bytes": lambda step: float(step.peak_bytes),
}
MEMORY = ("allocated", "reserved")


def number(value: object) -> float:
    """Return `value` as a float; NaN if it is not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def tree(value: object) -> Tree:
    """Return `value` if it is a dict, else an empty one."""
    return value if isinstance(value, dict) else {}


def curves_of(state: RunState) -> dict[str, Tree]:
    """Return every curve over the steps by name, see `downsample.curve`."""
    found = {name: curve([(step.step, value(step)) for step in state.steps]) for name, value in SCALARS.items()}
    found["held_out"] = curve([(float(step), loss) for step, loss in state.evaluations])
    for name in MEMORY:
        points = [(step, number(tree(details.get("memory")).get(name))) for step, details in state.detailed]
        found[name] = curve(points)
    return {name: each for name, each in found.items() if each}


def not_finite(state: RunState) -> list[int]:
    """Return the first fifty steps whose loss or gradient norm was NaN or Inf."""
    return [each.step for each in state.steps if not (math.isfinite(each.loss) and math.isfinite(each.grad_norm))][:50]


def phases_of(steps: Sequence[StepMetrics]) -> Tree:
    """Return the mean seconds of each phase over equal intervals of the run, and the middle step of each interval."""
    bounds = list(intervals(len(steps), MAX_PHASE_INTERVALS)) if steps else []
    means = {
        name: [
            math.fsum([step.phases.get(name, 0.0) for step in steps[begin:end]]) / (end - begin)
            for begin, end in bounds
        ]
        for name in PHASES
    }
    parts = {name: values for name, values in means.items() if any(value > 0 for value in values)}
    return {"steps": [steps[(begin + end) // 2].step for begin, end in bounds], "seconds": parts} if parts else {}


def ranks_of(state: RunState) -> Tree:
    """Return the spread over ranks: minimum, median and maximum of each quantity by step, and the outliers."""
    spreads: dict[str, list[list[float]]] = {}
    outliers: Counter[tuple[int, str]] = Counter()
    for step, details in state.detailed:
        ranks = tree(details.get("ranks"))
        at = number(ranks.get("step", step))
        for name in SPREADS:
            values = [number(tree(ranks.get(name)).get(each)) for each in ("min", "median", "max")]
            if all(map(math.isfinite, values)):
                spreads.setdefault(name, []).append([at, *values])
        found = ranks.get("outliers")
        for each in found if isinstance(found, list) else []:
            if isinstance(tree(each).get("rank"), int):
                outliers[each["rank"], str(each.get("what", ""))] += 1
    rows = [{"rank": rank, "what": what, "times": times} for (rank, what), times in outliers.most_common(8)]
    return {"spreads": spreads, "outliers": rows, "looked": len(state.detailed)} if spreads else {}


def groups_of(state: RunState) -> list[Tree]:
    """Return the latest gradient norm and update ratio of each weight group."""
    return [
        {"name": name} | {key: finite_or_none(number(tree(group).get(key))) for key in ("grad_norm", "update_ratio")}
        for name, group in tree(state.latest.get("groups")).items()
    ]


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
