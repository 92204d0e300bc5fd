"""Chooses the plan of least risk among those that tie, explains why others lost, and warns about the one that won."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from trimaran.core import Bytes, Plan, Prediction, show_bytes, show_seconds
from trimaran.cost import predict
from trimaran.cost.job import captures_steps
from trimaran.cost.step import MAX_PINNED_FRACTION, RELATIVE_ERROR
from trimaran.machine import Cluster
from trimaran.planner.plan_choices import CHUNKED, FUSED
from trimaran.planner.question import NearMiss, Question
from trimaran.planner.rules.legal import is_legal
from trimaran.planner.search.branch_and_bound import (
    NEARLY_FULL_FRACTION,
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


class Shortage(NamedTuple):
    """By how many bytes a plan exceeds the limit `most` of some memory."""

    over: Bytes
    most: Bytes
    what: str


def near_misses(ranked: Sequence[Plan], question: Question) -> tuple[NearMiss, ...]:
    """Return plans that nearly won, and why they lost: the winner with one change, then other meshes."""
    best = ranked[0]
    on_gpu = question.cluster.device.traits.has_graphs  # when gradients are summed matters only for CUDA graphs
    near = [plan for plan in variations(best) if is_legal(plan, question) and (on_gpu or plan.comm == best.comm)]
    near = [plan.model_copy(update={"prediction": predict(question.job, question.cluster, plan)}) for plan in near]
    reasons = ((plan, reason_lost(best, plan, question)) for plan in [*near, *ranked[1:]])
    return tuple(NearMiss(plan=plan, why=reason) for plan, reason in reasons if reason)


def variations(best: Plan) -> Iterator[Plan]:
    """Yield the plan with one change that a user would ask about."""
    changes: list[dict[str, Any]] = []
    if best.recompute != "none" or best.towers:
        changes.append({"recompute": "none", "towers": {}})
    changes += [{"recompute": mode} for mode in ("elementwise", "selective", "full") if mode != best.recompute][:1]
    if best.grad_accum % 2 == 0 and not best.rows_by_rank:
        changes.append({"micro_batch": 2 * best.micro_batch, "grad_accum": best.grad_accum // 2})
    if best.sharding in ("parameters", "gradients"):
        changes.append({"sharding": "optimizer"})
    elif best.mesh.dp_shard > 1:
        mesh = best.mesh.model_copy(update={"dp_replicate": best.mesh.dp, "dp_shard": 1})
        changes.append({"sharding": "none", "mesh": mesh})
    if best.mesh.world_size == best.mesh.dp_replicate > 1 and best.sharding == "none":
        changes.append({"comm": best.comm.model_copy(update={"overlap": not best.comm.overlap})})
    if best.comm.regather and best.mesh.tp > 1:
        changes.append({"comm": best.comm.model_copy(update={"regather": False})})
    if best.offload != "none":
        changes.append({"offload": "none"})
    if best.loss != "logits":
        changes.append({"loss": FUSED if best.loss == CHUNKED else "logits"})
    yield from (best.model_copy(update=change) for change in changes)


def reason_lost(best: Plan, plan: Plan, question: Question) -> str | None:
    """Return why the plan lost: the memory it lacks, or the term that takes the most extra time.

    None if neither holds: the search leaves out plans that it does not consider, such as huge micro-batches.
    """
    assert best.prediction is not None
    assert plan.prediction is not None
    best_prediction, prediction = best.prediction, plan.prediction
    if not prediction.fits:
        return too_big(prediction, question.cluster)
    if question.goal == "memory" and prediction.device_bytes > best_prediction.device_bytes:
        return f"needs {show_bytes(Bytes(prediction.device_bytes - best_prediction.device_bytes))} more"
    if prediction.step_seconds <= best_prediction.step_seconds:
        return _why_faster_lost(best, plan, question)
    more = {
        term: prediction.time.get(term, 0.0) - best_prediction.time.get(term, 0.0)
        for term in (*best_prediction.time, *prediction.time)
    }
    computing = more.pop("forward", 0.0) + more.pop("backward", 0.0)
    term, longer = max([*more.items(), ("computing", computing)], key=lambda item: item[1])
    if term == "comm":
        return _exposed_comm(best_prediction, prediction)
    return {
        "bubble": f"bubble {prediction.time.get('bubble', 0.0) / prediction.step_seconds:.0%}",
        "offload": f"offload costs {show_seconds(longer)} more",
        "optimizer": f"the update takes {show_seconds(longer)} more",
        "computing": _compute_reason(best, plan, longer, question),
    }.get(term, f"{term} takes {show_seconds(longer)} more")


def too_big(prediction: Prediction, cluster: Cluster) -> str:
    """Return what the plan lacks as text: memory of its device, of the host, or of both."""
    texts = {"device memory": "over", "host memory a node": "over on the host"}
    short = shortages(prediction, cluster)
    return ", ".join(f"{show_bytes(each.over)} {texts[each.what]}" for each in short) or "does not run"


def shortages(prediction: Prediction, cluster: Cluster) -> list[Shortage]:
    """Return which memory the plan exceeds, and by how much: of the device, then of the host."""
    device, host = (
        prediction.memory_limit or cluster.device.memory_bytes,
        Bytes(int(MAX_PINNED_FRACTION * cluster.host_bytes)),
    )
    both = (
        Shortage(Bytes(prediction.device_bytes - device), device, "device memory"),
        Shortage(Bytes(prediction.host_bytes - host), host, "host memory a node"),
    )
    return [each for each in both if each.over > 0]


def warnings_for(best: Plan, question: Question, cluster: Cluster) -> tuple[str, ...]:
    """Return warnings: a nearly full device, an error bar that reaches past its end, idle devices."""
    assert best.prediction is not None
    found, size = best.prediction, best.prediction.memory_limit or cluster.device.memory_bytes
    warnings = []
    occupancy = found.device_bytes / size
    if occupancy > NEARLY_FULL_FRACTION:
        warnings.append(
            f"memory is {occupancy:.0%} full: above {NEARLY_FULL_FRACTION:.0%} the allocator retries and steps get slow"
        )
    elif occupancy * (1 + found.error) > 1:
        warnings.append(f"memory is predicted within {found.error:.0%}, and {occupancy:.0%} full: it may not fit")
    if cluster.world_size < question.cluster.world_size:
        warnings.append(
            f"{question.cluster.world_size - cluster.world_size} of {question.cluster.world_size} devices idle"
        )
    if found.host_bytes > NEARLY_FULL_FRACTION * MAX_PINNED_FRACTION * cluster.host_bytes:
        warnings.append(f"a node must pin {show_bytes(found.host_bytes)} of its {show_bytes(cluster.host_bytes)}")
    return tuple(warnings)


def _why_faster_lost(best: Plan, plan: Plan, question: Question) -> str | None:
    """Return why a faster plan lost: a pin, or a tie. None if it is neither."""
    assert best.prediction is not None
    assert plan.prediction is not None
    gain, pins = best.prediction.step_seconds / plan.prediction.step_seconds, question.pins
    fields = [name for name in sorted(pins.model_fields_set - {"mesh"}) if getattr(plan, name) != getattr(best, name)]
    axes = [each for each in pins.mesh.model_fields_set if getattr(plan.mesh, each) != getattr(best.mesh, each)]
    if pinned := [*fields, *(f"mesh.{each}" for each in sorted(axes))]:
        return f"{gain - 1:.1%} faster, and plan.{pinned[0]} is pinned"
    return f"{gain - 1:.1%} faster, within the model's error" if gain <= TIE_RATIO else None


def _exposed_comm(best_prediction: Prediction, prediction: Prediction) -> str:
    """Return the communication that takes the most extra time: `all-gather of weights exposed 0.4 s on InfiniBand`."""
    more = {key: seconds - best_prediction.exposed.get(key, 0.0) for key, seconds in prediction.exposed.items()}
    key = max(more, key=lambda each: more[each], default="communication")
    what, _, where = key.partition(" on ")
    seconds = prediction.exposed.get(key, prediction.time["comm"])
    return f"{what} exposed {show_seconds(seconds)} on {where}" if where else f"{what} for {show_seconds(seconds)}"


def _compute_reason(best: Plan, plan: Plan, longer: float, question: Question) -> str:
    job, is_cuda = question.job, question.cluster.device.traits.has_graphs
    if is_cuda and captures_steps(job, best) and not captures_steps(job, plan):
        is_like_best = best.model_copy(update={"comm": plan.comm, "prediction": plan.prediction}) == plan
        why = "its gradients are summed during backward, so " if is_like_best else ""
        return f"{why}no CUDA graph can launch its kernels: {show_seconds(longer)} more"
    if (plan.recompute, plan.towers) != (best.recompute, best.towers):
        return f"recompute costs {show_seconds(longer)} more"
    if plan.loss != best.loss:
        return f"loss {plan.loss} costs {show_seconds(longer)} more"
    return f"smaller matmuls take {show_seconds(longer)} longer"
