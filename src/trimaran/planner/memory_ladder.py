"""The memory ladder: plan changes that need less memory, for a run that has run out of it or soon will.

There is one order for all who use it: the shortest predicted step of the plans that fit (`cheapest_first`). The doctor
recommends the first one. The launcher takes the first one that keeps what the user pinned (`next_rung`). Fragmented
memory has a rung before all others: expandable segments, which cost nothing (`may_expand_segments`).
Decision record: docs/decisions/0022-one-memory-ladder.md.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from pydantic import ValidationError

from trimaran.core import SHARDINGS, Plan, Prediction, UserError
from trimaran.cost import MAX_PINNED_FRACTION, predict
from trimaran.planner.question import Question
from trimaran.planner.rules.legal import check_plan
from trimaran.runs import uses_expandable_segments

Patch = dict[str, Any]  # recipe fields by dotted name, such as `plan.micro_batch`
# Of a device's memory that a changed plan may need. After an OOM the present plan needs at least all of it, so a rung
# must save at least 8 %.
MAX_MEMORY_FRACTION = 0.92
RECOMPUTE_LEVELS = ["none", "elementwise", "selective", "full"]
FIXED_TERMS = ("process",)  # memory terms that no plan changes
# What the launcher changes after an OOM even if the user pinned it: the run would end otherwise.
ADJUSTABLE_FIELDS = ("plan.micro_batch", "plan.micro_batches", "plan.grad_accum", "plan.recompute")


class Rung(NamedTuple):
    """A change of the plan, the changed plan, and its prediction."""

    patch: Patch
    plan: Plan
    prediction: Prediction


def plan_with(plan: Plan, patch: Patch) -> Plan:
    """Return the plan with the `plan.` fields of the patch applied. Raises ValidationError."""
    tree = plan.model_dump()
    for field, value in patch.items():
        section, *path = field.split(".")
        if section != "plan":
            continue
        here = tree
        for key in path[:-1]:
            here = here[key]
        here[path[-1]] = value
    return Plan.model_validate(tree)


def plan_bytes(prediction: Prediction) -> float:
    """Return the predicted device memory that depends on the plan."""
    fixed = sum(prediction.memory.get(term, 0) for term in FIXED_TERMS)
    return (prediction.device_bytes or prediction.peak_bytes) - fixed


def cheapest_first(plan: Plan, question: Question, *, needed_bytes: float, device_bytes: float) -> list[Rung]:
    """Return the changes after which the plan fits on its devices and its host, shortest step first.

    `needed_bytes` is what the present plan really needs. Predictions are scaled by its ratio to the predicted memory.
    """
    present, limit = plan_bytes(predict(question.job, question.cluster, plan)), MAX_MEMORY_FRACTION * device_bytes
    pinnable = MAX_PINNED_FRACTION * question.cluster.host_bytes
    fitting = []
    for patch in all_changes(plan):
        if "plan.offload" in patch and not question.cluster.device.traits.has_own_memory:
            continue  # a CPU has no host to offload to
        try:
            changed = plan_with(plan, patch)
            check_plan(changed, question.recipe, question.spec, question.cluster, question.outline, question.facts)
        except (UserError, ValidationError):
            continue
        rung = Rung(patch, changed, predict(question.job, question.cluster, changed))
        if plan_bytes(rung.prediction) * needed_bytes / present <= limit and rung.prediction.host_bytes <= pinnable:
            fitting.append(rung)
    return sorted(fitting, key=lambda rung: (rung.prediction.step_seconds, rung.prediction.peak_bytes, len(rung.patch)))


def next_rung(plan: Plan, question: Question | None = None, *, may_offload: bool = True) -> tuple[Plan, str] | None:
    """Return the plan to continue with after an OOM, and what changes; None if nothing is left to change.

    It is the one with the shortest predicted step of those that fit, with the same global batch. The user's pins of
    other fields than micro-batch, accumulation and recompute stay. If none fits, or nothing can be predicted, the rule
    decides: the next smaller micro-batch, then full recompute. `may_offload`: the host has memory to offload to.
    """
    if question is not None and question.outline is not None:
        available = float(question.cluster.device.memory_bytes)
        needed = max(available, plan_bytes(predict(question.job, question.cluster, plan)))
        for rung in cheapest_first(plan, question, needed_bytes=needed, device_bytes=available):
            stays = may_offload or rung.plan.offload == plan.offload
            if stays and not any(_is_pinned(field, question.pins) for field in rung.patch):
                return rung.plan.model_copy(update={"prediction": None}), describe_change(plan, rung.plan)
    patch = next(_smaller_micro_batches(plan), None) or ({"plan.recompute": "full"} if plan.recompute != "full" else {})
    if not patch:
        return None
    changed = plan_with(plan, patch).model_copy(update={"prediction": None})
    return changed, describe_change(plan, changed)


def may_expand_segments(plan: Plan, *, hole_bytes: float, wanted_bytes: float) -> bool:
    """Return whether expandable segments are the next rung: the allocator's free, scattered bytes were enough."""
    return hole_bytes >= wanted_bytes > 0 and not uses_expandable_segments(plan)


def all_changes(plan: Plan) -> Iterator[Patch]:
    """Yield every change that needs less memory: one of a kind, or one of each kind. The results of training stay.

    Context parallelism is combined with micro-batches and recompute only: it changes the mesh, as sharding does.
    """
    now = plan.recompute if isinstance(plan.recompute, str) else "selective"  # after every k-th layer comes full
    levels = RECOMPUTE_LEVELS[RECOMPUTE_LEVELS.index(now) + 1 :]
    sizes, recompute = list(_smaller_micro_batches(plan)), [{"plan.recompute": level} for level in levels]
    shardings: list[Patch] = []
    if plan.mesh.dp > 1 and plan.engine_traits.uses_fsdp:
        for stage in SHARDINGS[SHARDINGS.index(plan.sharding) + 1 :]:
            shards = {"plan.mesh.dp_replicate": 1, "plan.mesh.dp_shard": plan.mesh.dp, "plan.sharding": stage}
            # Only replicas do without overlap.
            shardings.append(shards if plan.comm.overlap else shards | {"plan.comm.overlap": True})
    others: list[Patch] = []
    if plan.loss == "logits":
        others.append({"plan.loss": "chunked"})
    if plan.mesh.tp > 1 and not plan.comm.regather:
        others.append({"plan.comm.regather": True})
    if plan.mesh.cp > 1 and plan.comm.context == "gather":
        others.append({"plan.comm.context": "ring"})
    if plan.offload == "none":
        others += [{"plan.offload": kind} for kind in ("activations", "optimizer", "parameters")]
    yield from _combined(sizes, recompute, shardings, others)
    for context in _context(plan):
        yield context
        for change in _combined(list(_smaller_micro_batches(plan_with(plan, context))), recompute):
            yield context | change


def _combined(*kinds: list[Patch]) -> Iterator[Patch]:
    for chosen in product(*([{}, *kind] for kind in kinds)):
        if patch := {field: value for change in chosen for field, value in change.items()}:
            yield patch


def _is_pinned(field: str, pins: Plan) -> bool:
    """Return whether the user pinned the field, such as `plan.mesh.cp`; not for what an OOM may change anyway."""
    if field in ADJUSTABLE_FIELDS:
        return False
    here: Any = pins
    for name in field.split(".")[1:]:
        if name not in here.model_fields_set:
            return False
        here = getattr(here, name)
    return True


def _smaller_micro_batches(plan: Plan) -> Iterator[Patch]:
    for part in range(2, plan.micro_batch + 1):
        if rows := plan.rows_by_rank:
            if all(each % part == 0 for each in rows):
                fewer = [each // part for each in rows]
                yield {"plan.micro_batches": fewer, "plan.grad_accum": plan.grad_accum * part}
        elif plan.micro_batch % part == 0:
            yield {"plan.micro_batch": plan.micro_batch // part, "plan.grad_accum": plan.grad_accum * part}


def _context(plan: Plan) -> Iterator[Patch]:
    """Yield more context parallelism with fewer data ranks: each holds a smaller part of its sequences.

    Accumulation makes up for the data ranks, so the global batch stays.
    """
    replicas, shards = plan.mesh.dp_replicate, plan.mesh.dp_shard
    if plan.micro_batches or not plan.engine_traits.splits_models or not plan.comm.overlap:
        return
    for factor in (2, 4, 8):
        if replicas % factor and shards % factor:
            continue
        axis, ranks = ("dp_replicate", replicas) if replicas % factor == 0 else ("dp_shard", shards)
        yield {f"plan.mesh.{axis}": ranks // factor, "plan.mesh.cp": plan.mesh.cp * factor,
               "plan.grad_accum": plan.grad_accum * factor}  # fmt: skip


def describe_change(plan: Plan, changed: Plan) -> str:
    """Return what differs between two plans, as text."""
    pairs = [
        ("data ranks", plan.mesh.dp, changed.mesh.dp),
        ("cp", plan.mesh.cp, changed.mesh.cp),
        ("sharding", plan.sharding, changed.sharding),
        ("micro-batch", plan.micro_batch, changed.micro_batch),
        ("accumulation", plan.grad_accum, changed.grad_accum),
        ("recompute", plan.recompute, changed.recompute),
        ("offload", plan.offload, changed.offload),
        ("loss", plan.loss, changed.loss),
        ("gathered inputs", *("again" if each.comm.regather else "saved" for each in (plan, changed))),
    ]
    return ", ".join(f"{name} {before} -> {after}" for name, before, after in pairs if before != after)
