"""Plans that differ from a plan in one setting, and train the same: what may be tried around a good plan.

`trimaran tune` measures those next to a plan, the autopilot also those that are further away, and the doctor recommends
some of them. The global batch, precision, engine, compression and local steps stay.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from trimaran.core import Plan, UserError
from trimaran.core.plan import CONTEXTS, SHARDINGS
from trimaran.models import split_outline
from trimaran.planner.memory_ladder import Patch, plan_with
from trimaran.planner.plan_choices import BUCKET_SIZES_MB, MEBIBYTE, UNIT_SIZES_MB
from trimaran.planner.question import Question
from trimaran.planner.rules.axis_rules import divisors
from trimaran.planner.rules.legal import check_plan
from trimaran.planner.search.goals import predicted
from trimaran.planner.search.space import MAX_MICRO_BATCH, rounds_of

RECOMPUTES: tuple[str | int, ...] = ("none", "elementwise", 8, 4, "selective", 2, "full")
LOSSES = ("logits", "fused", "chunked")
SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
MAX_PREFETCH = 4
GRADIENT_BYTES = 4
OFFLOADS = get_args(Plan.model_fields["offload"].annotation)

Changes = Callable[[Plan, Question], Iterator[Patch]]


class Neighbour(NamedTuple):
    """A plan that differs in one setting, which `kind` names, and the patch that leads to it."""

    kind: str
    patch: Patch
    plan: Plan


def neighbours(plan: Plan, question: Question) -> list[Neighbour]:
    """Return the legal neighbours of a plan, each with its prediction where the model is known. Pinned fields stay."""
    return [
        Neighbour(kind, patch, changed)
        for kind, patch in neighbour_patches(plan, question)
        if (changed := changed_plan(plan, patch, question)) is not None
    ]


def neighbour_patches(plan: Plan, question: Question, *, far: bool = False) -> Iterator[tuple[str, Patch]]:
    """Yield what may be changed, as kind and patch, whether or not the changed plan is legal or a field is pinned.

    With `far`, numbers take all their values, not only the next smaller and the next larger one.
    """
    kinds = CHANGES | FAR_CHANGES if far else CHANGES
    for kind, changes in kinds.items():
        yield from ((kind, patch) for patch in changes(plan, question))


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
    rows, sizes = plan.micro_batch * plan.grad_accum, _micro_batch_sizes(plan, question)
    at = sizes.index(plan.micro_batch)
    for size in sizes[max(0, at - 1) : at + 2]:
        if size != plan.micro_batch:
            yield {"plan.micro_batch": size, "plan.grad_accum": rows // size}


def _far_micro_batches(plan: Plan, question: Question) -> Iterator[Patch]:
    """Yield all larger micro-batches, also those of data ranks with unequal rows, and the next smaller one."""
    yield from larger_micro_batches(plan)
    if not plan.micro_batches:
        smaller = [each for each in _micro_batch_sizes(plan, question) if each < plan.micro_batch][-1:]
        rows = plan.micro_batch * plan.grad_accum
        yield from ({"plan.micro_batch": size, "plan.grad_accum": rows // size} for size in smaller)


def _micro_batch_sizes(plan: Plan, question: Question) -> list[int]:
    most = max(plan.micro_batch, MAX_MICRO_BATCH[question.cluster.device.kind])
    return divisors(plan.micro_batch * plan.grad_accum, most=most)


def larger_micro_batches(plan: Plan) -> Iterator[Patch]:
    """Yield patches with larger micro-batches and less gradient accumulation, for the same global batch."""
    for times in range(2, plan.grad_accum + 1):
        if plan.grad_accum % times == 0:
            yield larger_micro_batch(plan, times)


def larger_micro_batch(plan: Plan, times: int) -> Patch:
    """Return the patch with micro-batches that are `times` as large, and as much less gradient accumulation."""
    accumulation: Patch = {"plan.grad_accum": plan.grad_accum // times}
    if rows := plan.rows_by_rank:
        return {"plan.micro_batches": [each * times for each in rows]} | accumulation
    return {"plan.micro_batch": plan.micro_batch * times} | accumulation


def _recomputes(plan: Plan, question: Question) -> Iterator[Patch]:
    layers = question.outline.layers if question.outline else 2
    for level in RECOMPUTES:
        is_useful = not isinstance(level, int) or level < layers
        if level != plan.recompute and is_useful and not plan.towers:
            yield {"plan.recompute": level}


def _offloads(plan: Plan, question: Question) -> Iterator[Patch]:
    """Yield the other kinds of offload. A CPU has no host to offload to, but may stop doing so."""
    kinds = OFFLOADS if question.cluster.device.traits.has_own_memory else ("none",)
    yield from ({"plan.offload": kind} for kind in kinds if kind != plan.offload)


def fewer_launches(plan: Plan) -> Iterator[Patch]:
    """Yield patches with which the host launches fewer kernels, one switch each.

    Replicas are CUDA graphs only if they sum their gradients after backward.
    """
    yield from ({f"plan.{field}": True} for field in ("compile", "cuda_graphs") if not getattr(plan, field))
    is_replicated = plan.mesh.world_size == plan.mesh.dp_replicate > 1 and plan.sharding == "none"
    if is_replicated and plan.comm.overlap and plan.comm.compression == "none" and not plan.comm.local.is_on:
        yield {"plan.comm.overlap": False}


def _compiled(plan: Plan, question: Question) -> Iterator[Patch]:
    yield {"plan.compile": not plan.compile}


def _graphs(plan: Plan, question: Question) -> Iterator[Patch]:
    if question.cluster.device.traits.has_graphs and plan.model_copy(update={"cuda_graphs": True}).captures_steps:
        yield {"plan.cuda_graphs": not plan.cuda_graphs}


def _shardings(plan: Plan, question: Question) -> Iterator[Patch]:
    """Yield the other sharding stages over all data ranks. Towers with a sharding of their own stay as they are."""
    data = plan.mesh.dp
    if data == 1 or plan.towers:
        return
    for stage in SHARDINGS:
        shard = 1 if stage == "none" else data
        if stage == plan.sharding and shard == plan.mesh.dp_shard:
            continue
        patch: dict[str, Any] = {"plan.sharding": stage}
        if shard != plan.mesh.dp_shard:
            patch |= {"plan.mesh.dp_replicate": data // shard, "plan.mesh.dp_shard": shard}
        yield patch if plan.comm.overlap else patch | {"plan.comm.overlap": True}


def _losses(plan: Plan, question: Question) -> Iterator[Patch]:
    yield from ({"plan.loss": kind} for kind in LOSSES if kind != plan.loss)


def _overlaps(plan: Plan, question: Question) -> Iterator[Patch]:
    if plan.mesh.world_size == plan.mesh.dp_replicate > 1:
        yield {"plan.comm.overlap": not plan.comm.overlap}


def _buckets(plan: Plan, question: Question) -> Iterator[Patch]:
    """Yield the next smaller and larger buckets, as far as they would hold another part of the gradients."""
    below, above = _bucket_sizes(plan, question)
    yield from ({"plan.comm.bucket_mb": size} for size in (*below[-1:], *above[:1]))


def _far_buckets(plan: Plan, question: Question) -> Iterator[Patch]:
    """Yield the next smaller buckets and all larger ones, up to the first that holds all gradients."""
    below, above = _bucket_sizes(plan, question)
    yield from ({"plan.comm.bucket_mb": size} for size in (*below[-1:], *above))


def _bucket_sizes(plan: Plan, question: Question) -> tuple[list[int], list[int]]:
    """Return the smaller and the larger sizes, without those that hold all gradients as another one does."""
    mesh, comm = plan.mesh, plan.comm
    if mesh.dp == 1 or mesh.tp * mesh.pp * mesh.ep > 1 or not comm.overlap or plan.offload != "none":
        return [], []
    every = GRADIENT_BYTES * question.outline.trained_parameters / MEBIBYTE if question.outline else float("inf")
    sizes = UNIT_SIZES_MB if plan.sharding != "none" else BUCKET_SIZES_MB
    larger = [size for size in sizes if size > comm.bucket_mb]
    above = [size for size, before in zip(larger, [comm.bucket_mb, *larger], strict=False) if before < every]
    return [size for size in sizes if size < comm.bucket_mb and size < every], above


def _prefetches(plan: Plan, question: Question) -> Iterator[Patch]:
    if plan.sharding != "none" and plan.mesh.pp == 1:
        for depth in (plan.comm.prefetch - 1, plan.comm.prefetch + 1):
            if 1 <= depth <= MAX_PREFETCH:
                yield {"plan.comm.prefetch": depth}


def _schedules(plan: Plan, question: Question) -> Iterator[Patch]:
    """Yield the other schedules. Stages that fit one stay as they are: their cut may follow from measured times."""
    outline, ranks = question.outline, plan.mesh.pp
    if ranks == 1 or outline is None:
        return
    for schedule in SCHEDULES:
        if schedule == plan.pipeline.schedule:
            continue
        for rounds in rounds_of(schedule, outline.layers, ranks):
            if rounds * ranks == plan.num_stages:
                yield {"plan.pipeline.schedule": schedule}
                continue
            stages = split_outline(outline, rounds * ranks, seq_len=question.recipe.data.seq_len)
            yield {"plan.pipeline.schedule": schedule, "plan.pipeline.stages": list(stages)}


def _contexts(plan: Plan, question: Question) -> Iterator[Patch]:
    if plan.mesh.cp > 1:
        yield from ({"plan.comm.context": each} for each in CONTEXTS if each != plan.comm.context)


def _regathers(plan: Plan, question: Question) -> Iterator[Patch]:
    if plan.mesh.tp > 1:
        yield {"plan.comm.regather": not plan.comm.regather}


CHANGES: dict[str, Changes] = {
    "micro-batch": _micro_batches,
    "recompute": _recomputes,
    "offload": _offloads,
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
FAR_CHANGES: dict[str, Changes] = {"micro-batch": _far_micro_batches, "bucket size": _far_buckets}
