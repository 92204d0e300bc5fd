"""Why plans lost, and what to beware of in the one that won."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from trimaran.core import Bytes, Plan, Prediction, UserError, show_bytes, show_seconds
from trimaran.cost import predict
from trimaran.cost.step import HOST_SHARE
from trimaran.hardware import Cluster
from trimaran.planner.branch_and_bound import ALIKE, FULL
from trimaran.planner.generic_rules import check_question
from trimaran.planner.loss_choices import PIECES, WHOLE
from trimaran.planner.question import NearMiss, Question


class Short(NamedTuple):
    """How many bytes a plan takes too many, and what of: so many of them may be taken."""

    over: Bytes
    most: Bytes
    what: str


def misses_of(ranked: Sequence[Plan], question: Question) -> tuple[NearMiss, ...]:
    """Return what was nearly chosen, and why it was not: the winner with one thing changed, then other meshes."""
    best = ranked[0]
    near = [plan for plan in variations(best) if _runs(plan, question)]
    near = [plan.model_copy(update={"prediction": predict(question.job, question.cluster, plan)}) for plan in near]
    told = ((plan, why(best, plan, question)) for plan in [*near, *ranked[1:]])
    return tuple(NearMiss(plan=plan, why=reason) for plan, reason in told if reason)


def variations(best: Plan) -> Iterator[Plan]:
    """Yield the plan with one thing changed: what a person would ask about."""
    changes: list[dict[str, Any]] = []
    if best.recompute != "none" or best.towers:
        changes.append({"recompute": "none", "towers": {}})
    changes += [{"recompute": mode} for mode in ("selective", "full") if mode != best.recompute][:1]
    if best.grad_accum % 2 == 0:
        changes.append({"micro_batch": 2 * best.micro_batch, "grad_accum": best.grad_accum // 2})
    if best.sharding in ("parameters", "gradients"):
        changes.append({"sharding": "optimizer"})
    elif best.mesh.dp_shard > 1:
        mesh = best.mesh.model_copy(update={"dp_replicate": best.mesh.dp, "dp_shard": 1})
        changes.append({"sharding": "none", "mesh": mesh})
    if best.offload != "none":
        changes.append({"offload": "none"})
    if best.loss != "logits":
        changes.append({"loss": WHOLE if best.loss == PIECES else "logits"})
    yield from (best.model_copy(update=change) for change in changes)


def why(best: Plan, plan: Plan, question: Question) -> str | None:
    """Return why the plan lost: what it lacks in memory, or what takes longest more in it than in the best.

    None where it lost for neither: a search does not look past what makes a device faster, as huge micro-batches.
    """
    assert best.prediction is not None
    assert plan.prediction is not None
    mine, its = best.prediction, plan.prediction
    if not its.fits:
        return too_big(its, question.cluster)
    if question.goal == "memory" and its.device_bytes > mine.device_bytes:
        return f"needs {show_bytes(Bytes(its.device_bytes - mine.device_bytes))} more"
    if its.step_seconds <= mine.step_seconds:
        return _faster(best, plan, question)
    more = {term: its.time.get(term, 0.0) - mine.time.get(term, 0.0) for term in (*mine.time, *its.time)}
    computing = more.pop("forward", 0.0) + more.pop("backward", 0.0)
    term, longer = max([*more.items(), ("computing", computing)], key=lambda item: item[1])
    if term == "comm":
        return _talk(mine, its)
    return {
        "bubble": f"bubble {its.time.get('bubble', 0.0) / its.step_seconds:.0%}",
        "offload": f"offload costs {show_seconds(longer)} more",
        "optimizer": f"the update takes {show_seconds(longer)} more",
        "computing": _computing(best, plan, longer),
    }.get(term, f"{term} takes {show_seconds(longer)} more")


def too_big(prediction: Prediction, cluster: Cluster) -> str:
    """Return what the plan lacks: memory of its device, or of the host, or both."""
    told = {"device memory": "over", "host memory a node": "over on the host"}
    short = shortages(prediction, cluster)
    return ", ".join(f"{show_bytes(each.over)} {told[each.what]}" for each in short) or "does not run"


def shortages(prediction: Prediction, cluster: Cluster) -> list[Short]:
    """Return what there is too little of for the plan, and by how much: of the device, then of the host."""
    device, host = cluster.device.memory_bytes, Bytes(int(HOST_SHARE * cluster.host_bytes))
    both = (
        Short(Bytes(prediction.device_bytes - device), device, "device memory"),
        Short(Bytes(prediction.host_bytes - host), host, "host memory a node"),
    )
    return [each for each in both if each.over > 0]


def warnings_for(best: Plan, question: Question, cluster: Cluster) -> tuple[str, ...]:
    """Return what to beware of: a device nearly full, an error bar that reaches past its end, devices left idle."""
    assert best.prediction is not None
    found, size = best.prediction, cluster.device.memory_bytes
    told = []
    occupancy = found.device_bytes / size
    if occupancy > FULL:
        told.append(f"memory is {occupancy:.0%} full: above {FULL:.0%} the allocator retries and steps get slow")
    elif occupancy * (1 + found.error) > 1:
        told.append(f"memory is predicted within {found.error:.0%}, and {occupancy:.0%} full: it may not fit")
    if cluster.world_size < question.cluster.world_size:
        told.append(f"{question.cluster.world_size - cluster.world_size} of {question.cluster.world_size} devices idle")
    if found.host_bytes > FULL * HOST_SHARE * cluster.host_bytes:
        told.append(f"a node must pin {show_bytes(found.host_bytes)} of its {show_bytes(cluster.host_bytes)}")
    return tuple(told)


def _faster(best: Plan, plan: Plan, question: Question) -> str | None:
    """Return why a plan that is faster lost: by a pin, or by too little; None where it is neither."""
    assert best.prediction is not None
    assert plan.prediction is not None
    gain, pins = best.prediction.step_seconds / plan.prediction.step_seconds, question.pins
    whole = [name for name in sorted(pins.model_fields_set - {"mesh"}) if getattr(plan, name) != getattr(best, name)]
    axes = [each for each in pins.mesh.model_fields_set if getattr(plan.mesh, each) != getattr(best.mesh, each)]
    if pinned := [*whole, *(f"mesh.{each}" for each in sorted(axes))]:
        return f"{gain - 1:.1%} faster, and plan.{pinned[0]} is pinned"
    return f"{gain - 1:.1%} faster, too little to tell from chance" if gain <= ALIKE else None


def _talk(mine: Prediction, its: Prediction) -> str:
    """Return what travels longest more: `all-gather of weights exposed 0.4 s on InfiniBand`."""
    more = {key: seconds - mine.exposed.get(key, 0.0) for key, seconds in its.exposed.items()}
    key = max(more, key=lambda each: more[each], default="talking")
    what, _, where = key.partition(" on ")
    seconds = its.exposed.get(key, its.time["comm"])
    return f"{what} exposed {show_seconds(seconds)} on {where}" if where else f"{what} for {show_seconds(seconds)}"


def _computing(best: Plan, plan: Plan, longer: float) -> str:
    if (plan.recompute, plan.towers) != (best.recompute, best.towers):
        return f"recompute costs {show_seconds(longer)} more"
    if plan.loss != best.loss:
        return f"loss {plan.loss} costs {show_seconds(longer)} more"
    return f"smaller products compute {show_seconds(longer)} longer"


def _runs(plan: Plan, question: Question) -> bool:
    try:
        check_question(plan, question)
    except UserError:
        return False
    return True
