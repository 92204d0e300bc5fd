"""Plans that differ from a plan in one setting, and train the same: what may be tried around a good plan.

`trimaran tune` measures those next to a plan, the autopilot also those that are further away, and the doctor recommends
some of them. The global batch, precision, engine, compression and local steps stay.
"""

from collections.abc import Iterator
from typing import NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from trimaran.core import CONTEXTS, SHARDINGS, Plan, UserError
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


class Neighbour(NamedTuple):
    """A plan that differs in one setting, which `kind` names, and the patch that leads to it."""

    kind: str
    patch: Patch
    plan: Plan


def neighbours(plan: Plan, question: Question) -> list[Neighbour]:
    """Return the legal neighbours of a plan, each with its prediction where the model is known. Pinned fields stay."""
    found = []
    for kind, patch in neighbour_patches(plan, question):
        try:
            changed = plan_with(plan, patch)
            check_plan(changed, question.recipe, question.spec, question.cluster, question.outline, question.facts)
        except (UserError, ValidationError):
            continue
        if changed.global_batch == plan.global_batch and keeps_pins(changed, question.pins):
            found.append(Neighbour(kind, patch, predicted(changed, question) if question.outline else changed))
    return found


def neighbour_patches(plan: Plan, question: Question, *, far: bool = False) -> Iterator[tuple[str, Patch]]:
    """Yield what may be changed, as kind and patch, whether or not the changed plan is legal or a field is pinned.

    With `far`, numbers take all their values, not only the next smaller and the next larger one.
    """
    mesh, comm, outline, device = plan.mesh, plan.comm, question.outline, question.cluster.device
    if far:  # also of data ranks with unequal rows
        yield from (("micro-batch", patch) for patch in larger_micro_batches(plan))
    if not plan.micro_batches:
        rows = plan.micro_batch * plan.grad_accum
        sizes = divisors(rows, most=max(plan.micro_batch, MAX_MICRO_BATCH[device.kind]))
        at = sizes.index(plan.micro_batch)
        for size in (*sizes[max(0, at - 1) : at], *(() if far else sizes[at + 1 : at + 2])):
            yield "micro-batch", {"plan.micro_batch": size, "plan.grad_accum": rows // size}
    layers = outline.layers if outline else 2
    for level in RECOMPUTES:
        if level != plan.recompute and (not isinstance(level, int) or level < layers) and not plan.towers:
            yield "recompute", {"plan.recompute": level}
    for kind in OFFLOADS if device.traits.has_own_memory else ("none",):  # a CPU has no host to offload to
        if kind != plan.offload:
            yield "offload", {"plan.offload": kind}
    yield "compile", {"plan.compile": not plan.compile}
    if device.traits.has_graphs and plan.model_copy(update={"cuda_graphs": True}).captures_steps:
        yield "CUDA graphs", {"plan.cuda_graphs": not plan.cuda_graphs}
    # The other sharding stages over all data ranks. Towers with a sharding of their own stay as they are.
    for stage in SHARDINGS if mesh.dp > 1 and not plan.towers else ():
        shard = 1 if stage == "none" else mesh.dp
        if stage != plan.sharding or shard != mesh.dp_shard:
            patch: Patch = {"plan.sharding": stage}
            if shard != mesh.dp_shard:
                patch |= {"plan.mesh.dp_replicate": mesh.dp // shard, "plan.mesh.dp_shard": shard}
            yield "sharding", patch if comm.overlap else patch | {"plan.comm.overlap": True}
    yield from (("loss", {"plan.loss": kind}) for kind in LOSSES if kind != plan.loss)
    if mesh.world_size == mesh.dp_replicate > 1:
        yield "overlap", {"plan.comm.overlap": not comm.overlap}
    below, above = _bucket_sizes(plan, question)
    for size in (*below[-1:], *(above if far else above[:1])):
        yield "bucket size", {"plan.comm.bucket_mb": size}
    for depth in (comm.prefetch - 1, comm.prefetch + 1) if plan.sharding != "none" and mesh.pp == 1 else ():
        if 1 <= depth <= MAX_PREFETCH:
            yield "prefetch", {"plan.comm.prefetch": depth}
    # Stages that fit a schedule stay as they are: their cut may follow from measured times.
    for schedule in SCHEDULES if mesh.pp > 1 and outline else ():
        for rounds in rounds_of(schedule, layers, mesh.pp) if schedule != plan.pipeline.schedule else ():
            patch = {"plan.pipeline.schedule": schedule}
            if rounds * mesh.pp != plan.num_stages:
                assert outline is not None
                stages = split_outline(outline, rounds * mesh.pp, seq_len=question.recipe.data.seq_len)
                patch["plan.pipeline.stages"] = list(stages)
            yield "schedule", patch
    if mesh.cp > 1:
        yield from (("context", {"plan.comm.context": each}) for each in CONTEXTS if each != comm.context)
    if mesh.tp > 1:
        yield "regather", {"plan.comm.regather": not comm.regather}


def keeps_pins(plan: BaseModel, pins: BaseModel) -> bool:
    """Return whether the plan has the value of every pinned field, in the sections, too."""
    for name in pins.model_fields_set - {"prediction"}:
        wanted, own = getattr(pins, name), getattr(plan, name)
        both = isinstance(wanted, BaseModel) and isinstance(own, BaseModel) and type(wanted) is type(own)
        if not (keeps_pins(own, wanted) if both else own == wanted):
            return False
    return True


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


def fewer_launches(plan: Plan) -> Iterator[Patch]:
    """Yield one switch each with which the host launches fewer kernels. Graphs need gradients summed after backward."""
    yield from ({f"plan.{field}": True} for field in ("compile", "cuda_graphs") if not getattr(plan, field))
    is_replicated = plan.mesh.world_size == plan.mesh.dp_replicate > 1 and plan.sharding == "none"
    if is_replicated and plan.comm.overlap and plan.comm.compression == "none" and not plan.comm.local.is_on:
        yield {"plan.comm.overlap": False}


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
