"""Chooses the plan of least risk among those that tie, explains why others lost, and warns about the one that won."""

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from trimaran.core import Bytes, Plan, Prediction, TemplateText, show_bytes, show_seconds, templated
from trimaran.cost import MAX_PINNED_FRACTION, RELATIVE_ERROR, captures_steps, predict
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
DEVICE_MEMORY = "device memory"


class RankedPlans(NamedTuple):
    """The chosen plan, then the best of other meshes, fastest first."""

    plans: list[FoundPlan]
    faster: list[FoundPlan]  # that offload, but do not win by more than the error bar; searched only if others are


def ranked_by_risk(space: Space, evaluator: PlanEvaluator, *, limit: float = math.inf, others: int = 0) -> RankedPlans:
    """Return the plans that fit, as `find_plans` does. One that offloads is only chosen if no other is as fast."""
    if space.offloads() != ("none",):
        plain = find_plans(space.without_offload(), evaluator, limit=limit, others=others)
        if plain.by_mesh:
            # Without other plans to show, only a plan that would be chosen is searched for.
            enough = plain.best_seconds if others else plain.best_seconds / OFFLOAD_RATIO
            found = find_plans(space, evaluator, limit=enough).by_mesh.values()
            offloading = ([each for each in founds if each.plan.offload != "none"] for founds in found)
            fastest = [min(each, key=attrgetter("seconds")) for each in offloading if each]
            faster = sorted((each for each in fastest if each.seconds < enough), key=attrgetter("seconds"))
            if not faster or OFFLOAD_RATIO * faster[0].seconds >= plain.best_seconds:
                return RankedPlans(plain.ranked(), faster[:MAX_FASTER])
    return RankedPlans(find_plans(space, evaluator, limit=limit, others=others).ranked(), [])


def ties_of(ranked: Sequence[Plan], faster: Sequence[Plan]) -> Iterator[NearMiss]:
    """Yield the plans that tie with the chosen one, which is the first, and why it was preferred."""
    chosen = ranked[0]
    assert chosen.prediction is not None
    for index, plan in enumerate([*faster, *ranked[1:]]):
        assert plan.prediction is not None
        gain = chosen.prediction.step_seconds / plan.prediction.step_seconds
        if index >= len(faster) and not 1 / TIE_RATIO <= gain <= TIE_RATIO:
            continue
        risk = _risk(chosen, plan)
        if abs(gain - 1) < MIN_SHOWN_GAIN:
            why = templated("as fast, but {risk}", risk=risk)
        elif gain > 1:
            why = templated("{gain} faster, but {risk}", gain=f"{gain - 1:.1%}", risk=risk)
        else:
            why = templated("{gain} slower, and {risk}", gain=f"{1 / gain - 1:.1%}", risk=risk)
        yield NearMiss(plan=plan, why=why)


def _risk(chosen: Plan, plan: Plan) -> TemplateText:
    assert chosen.prediction is not None
    assert plan.prediction is not None
    if plan.prediction.host_bytes > chosen.prediction.host_bytes:
        return templated("pins {size} of host memory a node", size=show_bytes(plan.prediction.host_bytes))
    if plan.offload != chosen.offload:
        return templated("offloads {what}", what=templated(plan.offload))
    axes, own = (num_model_axes(mesh_key_of(each)) for each in (plan, chosen))
    if axes > own:
        kept = own or templated("none")
        if axes == 1:
            return templated("splits the model by {axes} axis instead of {own}", axes=axes, own=kept)
        return templated("splits the model by {axes} axes instead of {own}", axes=axes, own=kept)
    return templated("not simpler")


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


def reason_lost(best: Plan, plan: Plan, question: Question) -> TemplateText | None:
    """Return why the plan lost: the memory it lacks, or the term that takes the most extra time.

    None if neither holds: the search leaves out plans that it does not consider, such as huge micro-batches.
    """
    assert best.prediction is not None
    assert plan.prediction is not None
    was, now, pins = best.prediction, plan.prediction, question.pins
    if not now.fits:
        return too_big(now, question.cluster)
    if question.goal == "memory" and now.device_bytes > was.device_bytes:
        return templated("needs {size} more", size=show_bytes(Bytes(now.device_bytes - was.device_bytes)))
    if now.step_seconds <= was.step_seconds:  # a pin, or a tie
        changed = [name for name in pins.model_fields_set - {"mesh"} if getattr(plan, name) != getattr(best, name)]
        axes = [each for each in pins.mesh.model_fields_set if getattr(plan.mesh, each) != getattr(best.mesh, each)]
        ratio = was.step_seconds / now.step_seconds
        if pinned := [*sorted(changed), *(f"mesh.{each}" for each in sorted(axes))]:
            return templated("{gain} faster, and plan.{field} is pinned", gain=f"{ratio - 1:.1%}", field=pinned[0])
        gain = f"{ratio - 1:.1%}"
        return templated("{gain} faster, within the model's error", gain=gain) if ratio <= TIE_RATIO else None
    more = {term: now.time.get(term, 0.0) - was.time.get(term, 0.0) for term in (*was.time, *now.time)}
    computing = more.pop("forward", 0.0) + more.pop("backward", 0.0)
    term, longer = max([*more.items(), ("computing", computing)], key=lambda item: item[1])
    time = show_seconds(longer)
    match term:
        case "comm":
            exposed = {key: seconds - was.exposed.get(key, 0.0) for key, seconds in now.exposed.items()}
            key = max(exposed, key=lambda each: exposed[each], default="communication")
            what, _, link = key.partition(" on ")
            payload, time = templated(what), show_seconds(now.exposed.get(key, now.time["comm"]))
            if link:
                return templated("{payload} exposed {time} on {link}", payload=payload, time=time, link=link)
            return templated("{payload} for {time}", payload=payload, time=time)
        case "bubble":
            return templated("bubble {share}", share=f"{now.time.get('bubble', 0.0) / now.step_seconds:.0%}")
        case "offload":
            return templated("offload costs {time} more", time=time)
        case "optimizer":
            return templated("the update takes {time} more", time=time)
        case "computing":
            job, is_cuda = question.job, question.cluster.device.traits.has_graphs
            if is_cuda and captures_steps(job, best) and not captures_steps(job, plan):
                if best.model_copy(update={"comm": plan.comm, "prediction": plan.prediction}) == plan:
                    return templated(
                        "its gradients are summed during backward, so no CUDA graph can launch its kernels: "
                        "{time} more",
                        time=time,
                    )
                return templated("no CUDA graph can launch its kernels: {time} more", time=time)
            if (plan.recompute, plan.towers) != (best.recompute, best.towers):
                return templated("recompute costs {time} more", time=time)
            if plan.loss != best.loss:
                return templated("loss {loss} costs {time} more", loss=plan.loss, time=time)
            return templated("smaller matmuls take {time} longer", time=time)
    return templated("{term} takes {time} more", term=templated(term), time=time)


def too_big(prediction: Prediction, cluster: Cluster) -> TemplateText:
    """Return what the plan lacks: memory of its device, of the host, or of both."""
    short = shortages(prediction, cluster)
    sizes = [show_bytes(each.over) for each in short]
    if len(sizes) == 2:
        return templated("{size} over, {host} over on the host", size=sizes[0], host=sizes[1])
    if not sizes:
        return templated("does not run")
    if short[0].what == DEVICE_MEMORY:
        return templated("{size} over", size=sizes[0])
    return templated("{size} over on the host", size=sizes[0])


def shortages(prediction: Prediction, cluster: Cluster) -> list[Shortage]:
    """Return which memory the plan exceeds, and by how much: of the device, then of the host."""
    device = prediction.memory_limit or cluster.device.memory_bytes
    host = Bytes(int(MAX_PINNED_FRACTION * cluster.host_bytes))
    both = (
        Shortage(Bytes(prediction.device_bytes - device), device, DEVICE_MEMORY),
        Shortage(Bytes(prediction.host_bytes - host), host, "host memory a node"),
    )
    return [each for each in both if each.over > 0]


def warnings_for(best: Plan, question: Question, cluster: Cluster) -> Iterator[str]:
    """Yield warnings: a nearly full device, an error bar that reaches past its end, idle devices."""
    assert best.prediction is not None
    found, size = best.prediction, best.prediction.memory_limit or cluster.device.memory_bytes
    occupancy = found.device_bytes / size
    if occupancy > NEARLY_FULL_FRACTION:
        limit = f"{NEARLY_FULL_FRACTION:.0%}"
        yield f"memory is {occupancy:.0%} full: above {limit} the allocator retries and steps get slow"
    elif occupancy * (1 + found.error) > 1:
        yield f"memory is predicted within {found.error:.0%}, and {occupancy:.0%} full: it may not fit"
    if idle := question.cluster.world_size - cluster.world_size:
        yield f"{idle} of {question.cluster.world_size} devices idle"
    if found.host_bytes > NEARLY_FULL_FRACTION * MAX_PINNED_FRACTION * cluster.host_bytes:
        yield f"a node must pin {show_bytes(found.host_bytes)} of its {show_bytes(cluster.host_bytes)}"
