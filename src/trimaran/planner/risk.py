"""Chooses the plan of least risk among those that the cost model cannot tell apart, and names the others."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trimaran.core import Plan, show_bytes
from trimaran.cost.step import RELATIVE_ERROR
from trimaran.planner.question import NearMiss
from trimaran.planner.search.branch_and_bound import (
    TIE_RATIO,
    FoundPlan,
    find_plans,
    mesh_key_of,
    num_model_axes,
)
from trimaran.planner.search.evaluator import PlanEvaluator
from trimaran.planner.search.space import Space

# Offloaded tensors pin host memory, and copies to the host are the least certain term of a step. So a plan that
# offloads must be faster than all that do not by more than the error bar of several GPUs. Between other plans, whose
# errors are alike, `TIE_RATIO` is enough.
OFFLOAD_RATIO = 1 + RELATIVE_ERROR["few"]
MAX_FASTER = 2  # offloading plans that are named
MIN_SHOWN_GAIN = 5e-4


class RankedPlans(NamedTuple):
    """The chosen plan, then the best of other meshes, fastest first.

    faster: plans that offload and are faster than the chosen one, but not by more than the error bar; searched only if
        other plans are.
    """

    plans: list[FoundPlan]
    faster: list[FoundPlan]


def ranked_by_risk(space: Space, evaluator: PlanEvaluator, *, limit: float = math.inf, others: int = 0) -> RankedPlans:
    """Return the plans that fit. One that offloads is only chosen if no other is nearly as fast.

    `limit` and `others` are those of `find_plans`.
    """
    if space.offloads() == ("none",):
        return RankedPlans(find_plans(space, evaluator, limit=limit, others=others).ranked(), [])
    plain = find_plans(space.without_offload(), evaluator, limit=limit, others=others)
    if not plain.by_mesh:
        return RankedPlans(find_plans(space, evaluator, limit=limit, others=others).ranked(), [])
    # Without other plans to show, only a plan that would be chosen is searched for.
    enough = plain.best_seconds if others else plain.best_seconds / OFFLOAD_RATIO
    found = find_plans(space, evaluator, limit=enough).by_mesh.values()
    fastest = [min(offloading, key=_seconds) for founds in found if (offloading := list(filter(_offloads, founds)))]
    faster = sorted((each for each in fastest if each.seconds < enough), key=_seconds)
    if faster and OFFLOAD_RATIO * faster[0].seconds < plain.best_seconds:
        return RankedPlans(find_plans(space, evaluator, limit=limit, others=others).ranked(), [])
    return RankedPlans(plain.ranked(), faster[:MAX_FASTER])


def _seconds(found: FoundPlan) -> float:
    return found.seconds


def _offloads(found: FoundPlan) -> bool:
    return found.plan.offload != "none"


def ties_of(ranked: Sequence[Plan], faster: Sequence[Plan]) -> Iterator[NearMiss]:
    """Yield the plans that tie with the chosen one, which is the first, and why it was preferred."""
    chosen = ranked[0]
    assert chosen.prediction is not None
    for index, plan in enumerate([*faster, *ranked[1:]]):
        assert plan.prediction is not None
        gain = chosen.prediction.step_seconds / plan.prediction.step_seconds
        if index < len(faster) or 1 / TIE_RATIO <= gain <= TIE_RATIO:
            yield NearMiss(plan=plan, why=f"{_speed(gain)} {_risk(chosen, plan)}")


def _speed(gain: float) -> str:
    if abs(gain - 1) < MIN_SHOWN_GAIN:
        return "as fast, but"
    return f"{gain - 1:.1%} faster, but" if gain > 1 else f"{1 / gain - 1:.1%} slower, and"


def _risk(chosen: Plan, plan: Plan) -> str:
    """Return what is riskier about a plan than about the chosen one."""
    assert chosen.prediction is not None
    assert plan.prediction is not None
    if plan.prediction.host_bytes > chosen.prediction.host_bytes:
        return f"pins {show_bytes(plan.prediction.host_bytes)} of host memory a node"
    if plan.offload != chosen.offload:
        return f"offloads {plan.offload}"
    if (axes := _num_axes(plan)) > (own := _num_axes(chosen)):
        return f"splits the model by {axes} {'axis' if axes == 1 else 'axes'} instead of {own or 'none'}"
    return "not simpler"


def _num_axes(plan: Plan) -> int:
    return num_model_axes(mesh_key_of(plan))
