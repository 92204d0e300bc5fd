"""Plans that differ from a plan in one setting, and train the same: what `trimaran tune` measures around a good plan.

The global batch, precision, engine, compression and local steps stay, and so does everything that the user pinned.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from trimaran.core import Plan, UserError
from trimaran.models import split_outline
from trimaran.planner.comm_choices import BUCKET_SIZES_MB, MEBIBYTE, UNIT_SIZES_MB
from trimaran.planner.degrees import divisors
from trimaran.planner.legal import check_plan
from trimaran.planner.memory_ladder import SHARDING_ORDER, Patch, plan_with
from trimaran.planner.question import Question
from trimaran.planner.search import predicted
from trimaran.planner.space import MAX_MICRO_BATCH, rounds_of

RECOMPUTES: tuple[str | int, ...] = ("none", "elementwise", 8, 4, "selective", 2, "full")
LOSSES = ("logits", "fused", "chunked")
SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
MAX_PREFETCH = 4
GRADIENT_BYTES = 4

Changes = Callable[[Plan, Question], Iterator[Patch]]


class Neighbour(NamedTuple):
    """A plan that differs in one setting, which `kind` names, and the patch that leads to it."""

    kind: str
    patch: Patch
    plan: Plan


def neighbours(plan: Plan, question: Question) -> list[Neighbour]:
    """Return the legal neighbours of a plan, each with its prediction where the model is known."""
    found: list[Neighbour] = []
    for kind, changes in CHANGES.items():
        for patch in changes(plan, question):
            if (changed := changed_plan(plan, patch, question)) is not None:
                found.append(Neighbour(kind, patch, changed))
    return found


def changed_plan(plan: Plan, patch: Patch, question: Question) -> Plan | None:
    """Return the changed plan with its prediction; None if it is pinned otherwise, not legal, or trains other rows."""
    try:
        changed = plan_with(plan, patch)
        check_plan(changed, question.recipe, question.spec, question.cluster, question.outline, question.facts)
    except (UserError, ValidationError):
        return None
    if changed.global_batch != plan.global_batch or not keeps_pins(changed, question.pins):
        return None
    return changed if question.outline is None else predicted(changed, question)


def keeps_pins(plan: Plan, pins: Plan) -> bool:
    """Return whether the plan has the value of every pinned field, in the sections, too."""
    return _keeps(plan, pins)


def _keeps(value: BaseModel, pins: BaseModel) -> bool:
    for name in pins.model_fields_set:
        wanted, own = getattr(pins, name), getattr(value, name)
        if name == "prediction":
            continue
        both = isinstance(wanted, BaseModel) and isinstance(own, BaseModel) and type(wanted) is type(own)
        if not (_keeps(own, wanted) if both else own == wanted):
            return False
    return True


def _micro_batches(plan: Plan, question: Question) -> Iterator[Patch]:
    """Yield the next larger and the next smaller micro-batch, with the accumulation that keeps the global batch."""
    if plan.micro_batches:
        return
    rows = plan.micro_batch * plan.grad_accum
    sizes = divisors(rows, most=max(plan.micro_batch, MAX_MICRO_BATCH[question.cluster.device.kind]))
    at = sizes.index(plan.micro_batch)
    for size in sizes[max(0, at - 1) : at + 2]:
        if size != plan.micro_batch:
            yield {"plan.micro_batch": size, "plan.grad_accum": rows // size}


def _recomputes(plan: Plan, question: Question) -> Iterator[Patch]:
    layers = question.outline.layers if question.outline else 2
    for level in RECOMPUTES:
        is_useful = not isinstance(level, int) or level < layers
        if level != plan.recompute and is_useful and not plan.towers:
            yield {"plan.recompute": level}


def _compiled(plan: Plan, question: Question) -> Iterator[Patch]:
    yield {"plan.compile": not plan.compile}


def _graphs(plan: Plan, question: Question) -> Iterator[Patch]:
    if question.cluster.device.kind == "cuda" and plan.model_copy(update={"cuda_graphs": True}).captures_steps:
        yield {"plan.cuda_graphs": not plan.cuda_graphs}


def _shardings(plan: Plan, question: Question) -> Iterator[Patch]:
    """Yield the other sharding stages over all data ranks. Towers with a sharding of their own stay as they are."""
    data = plan.mesh.dp
    if data == 1 or plan.towers:
        return
    for stage in SHARDING_ORDER:
        shard = 1 if stage == "none" else data
        if stage == plan.sharding and shard == plan.mesh.dp_shard:
            continue
        patch: dict[str, Any] = {"plan.sharding": stage}
        patch |= {"plan.mesh.dp_replicate": data // shard, "plan.mesh.dp_shard": shard}
        yield patch if plan.comm.overlap else patch | {"plan.comm.overlap": True}


def _losses(plan: Plan, question: Question) -> Iterator[Patch]:
    yield from ({"plan.loss": kind} for kind in LOSSES if kind != plan.loss)


def _overlaps(plan: Plan, question: Question) -> Iterator[Patch]:
    if plan.mesh.world_size == plan.mesh.dp_replicate > 1:
        yield {"plan.comm.overlap": not plan.comm.overlap}


def _buckets(plan: Plan, question: Question) -> Iterator[Patch]:
    """Yield the next smaller and larger buckets, as far as they would hold another part of the gradients."""
    mesh, comm = plan.mesh, plan.comm
    if mesh.dp == 1 or mesh.tp * mesh.pp * mesh.ep > 1 or not comm.overlap or plan.offload != "none":
        return
    every = GRADIENT_BYTES * question.outline.trained_parameters / MEBIBYTE if question.outline else float("inf")
    sizes = UNIT_SIZES_MB if plan.sharding != "none" else BUCKET_SIZES_MB
    below = [size for size in sizes if size < comm.bucket_mb and size < every][-1:]
    above = [size for size in sizes if size > comm.bucket_mb and comm.bucket_mb < every][:1]
    yield from ({"plan.comm.bucket_mb": size} for size in (*below, *above))


def _prefetches(plan: Plan, question: Question) -> Iterator[Patch]:
    if plan.sharding != "none" and plan.mesh.pp == 1:
        for depth in (plan.comm.prefetch - 1, plan.comm.prefetch + 1):
            if 1 <= depth <= MAX_PREFETCH:
                yield {"plan.comm.prefetch": depth}


def _schedules(plan: Plan, question: Question) -> Iterator[Patch]:
    outline, ranks = question.outline, plan.mesh.pp
    if ranks == 1 or outline is None:
        return
    for schedule in SCHEDULES:
        if schedule == plan.pipeline.schedule:
            continue
        for rounds in rounds_of(schedule, outline.layers, ranks):
            stages = split_outline(outline, rounds * ranks, seq_len=question.recipe.data.seq_len)
            yield {"plan.pipeline.schedule": schedule, "plan.pipeline.stages": list(stages)}


def _contexts(plan: Plan, question: Question) -> Iterator[Patch]:
    if plan.mesh.cp > 1:
        yield {"plan.comm.context": "exchange" if plan.comm.context == "gather" else "gather"}


def _regathers(plan: Plan, question: Question) -> Iterator[Patch]:
    if plan.mesh.tp > 1:
        yield {"plan.comm.regather": not plan.comm.regather}


CHANGES: dict[str, Changes] = {
    "micro-batch": _micro_batches,
    "recompute": _recomputes,
    "compile": _compiled,
    "CUDA graphs": _graphs,
    "sharding": _shardings,
    "loss": _losses,
    "overlap": _overlaps,
    "bucket size": _buckets,
    "prefetch": _prefetches,
    "schedule": _schedules,
    "context": _contexts,
    "regather": _regathers,
}
