"""What a run did over its steps, thinned out for a page: curves, phases, the spread over ranks."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from trimaran.app.report.downsample import curve, stretches
from trimaran.app.views.run_state import RunState
from trimaran.core import PHASES, StepMetrics

Tree = dict[str, Any]
MAX_PLACES = 240  # of a stacked image
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
    """Return a number that a file holds; what is none is not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def tree(value: object) -> Tree:
    """Return the object that a file holds; what is none is empty."""
    return value if isinstance(value, dict) else {}


def curves_of(state: RunState) -> dict[str, Tree]:
    """Return every curve over the steps by its name, see `thin.curve`."""
    found = {name: curve([(step.step, value(step)) for step in state.steps]) for name, value in SCALARS.items()}
    found["held_out"] = curve([(float(step), loss) for step, loss in state.evaluations])
    for name in MEMORY:
        found[name] = curve([(step, number(tree(told.get("memory")).get(name))) for step, told in state.detailed])
    return {name: each for name, each in found.items() if each}


def not_finite(state: RunState) -> list[int]:
    """Return the steps whose loss or gradient was not a finite number, the first fifty."""
    return [each.step for each in state.steps if not (math.isfinite(each.loss) and math.isfinite(each.grad_norm))][:50]


def phases_of(steps: Sequence[StepMetrics]) -> Tree:
    """Return the mean seconds of each phase over every stretch of the run, and the step in its middle."""
    places = list(stretches(len(steps), MAX_PLACES)) if steps else []
    means = {
        name: [
            math.fsum([step.phases.get(name, 0.0) for step in steps[begin:end]]) / (end - begin)
            for begin, end in places
        ]
        for name in PHASES
    }
    parts = {name: values for name, values in means.items() if any(value > 0 for value in values)}
    return {"steps": [steps[(begin + end) // 2].step for begin, end in places], "seconds": parts} if parts else {}


def ranks_of(state: RunState) -> Tree:
    """Return how far the ranks were apart: least, median and most of each quantity by step, and who stood out."""
    spreads: dict[str, list[list[float]]] = {}
    outliers: Counter[tuple[int, str]] = Counter()
    for step, told in state.detailed:
        ranks = tree(told.get("ranks"))
        at = number(ranks.get("step", step))
        for name in SPREADS:
            values = [number(tree(ranks.get(name)).get(each)) for each in ("min", "median", "max")]
            if all(map(math.isfinite, values)):
                spreads.setdefault(name, []).append([at, *values])
        found = ranks.get("outliers")
        for each in found if isinstance(found, list) else []:
            if isinstance(tree(each).get("rank"), int):
                outliers[each["rank"], str(each.get("what", ""))] += 1
    who = [{"rank": rank, "what": what, "times": times} for (rank, what), times in outliers.most_common(8)]
    return {"spreads": spreads, "outliers": who, "looked": len(state.detailed)} if spreads else {}


def groups_of(state: RunState) -> list[Tree]:
    """Return what was last told about each group of weights: its gradient, and how much an update changes it."""
    return [
        {"name": name} | {key: finite_or_none(number(tree(told).get(key))) for key in ("grad_norm", "update_ratio")}
        for name, told in tree(state.latest.get("groups")).items()
    ]


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
