"""The memory ladder: plan changes that need less memory, for a run that has run out of it.

The launcher takes the next rung after an OOM (`next_rung`). The doctor recommends the cheapest one (`cheapest_first`).
Decision record: docs/decisions/0022-one-memory-ladder.md.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from pydantic import ValidationError

from trimaran.core import Plan, Prediction, UserError
from trimaran.cost import predict
from trimaran.planner.legal import check_plan
from trimaran.planner.question import Question

Patch = dict[str, Any]  # recipe fields by dotted name, such as `plan.micro_batch`
# Of a device's memory that a changed plan may need. After an OOM the present plan needs at least all of it, so a rung
# must save at least 8 %.
MAX_MEMORY_FRACTION = 0.92
FIXED_TERMS = ("process",)  # memory terms that no plan changes
RECOMPUTE_ORDER = ("none", "elementwise", "selective", "full")


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
    """Return the changes after which the plan fits on its devices, shortest step first.

    `needed_bytes` is what the present plan really needs. Predictions are scaled by its ratio to the predicted memory.
    """
    rungs = [rung for patch in all_changes(plan) if (rung := _rung(plan, patch, question))]
    fitting = _fitting(rungs, plan, question, needed_bytes=needed_bytes, device_bytes=device_bytes)
    return sorted(fitting, key=lambda rung: (rung.prediction.step_seconds, rung.prediction.peak_bytes, len(rung.patch)))


def next_rung(plan: Plan, question: Question | None = None) -> tuple[Plan, str] | None:
    """Return the plan to continue with after an OOM, and what changes; None if nothing is left to change.

    The global batch, the mesh and what is offloaded stay. The order is fixed: a smaller micro-batch first, then
    recompute. With a `question`, rungs that are illegal or save too little by prediction are skipped; if none saves
    enough, or nothing can be predicted, the rule decides: the next smaller micro-batch, then full recompute.
    """
    rungs: list[Rung] = []
    if question is not None and question.outline is not None:
        patches = sorted(_runtime_changes(plan), key=lambda patch: _rule_order(patch, plan))
        rungs = [rung for patch in patches if (rung := _rung(plan, patch, question))]
        available = float(question.cluster.device.memory_bytes)
        for rung in _fitting(rungs, plan, question, needed_bytes=available, device_bytes=available):
            return rung.plan.model_copy(update={"prediction": None}), _text(plan, rung.plan)
    patch = next(_smaller_micro_batches(plan), None) or ({"plan.recompute": "full"} if plan.recompute != "full" else {})
    if not patch:
        return None
    changed = plan_with(plan, patch).model_copy(update={"prediction": None})
    return changed, _text(plan, changed)


def all_changes(plan: Plan) -> Iterator[Patch]:
    """Yield every change that needs less memory: one of a kind, or one of each kind. The results of training stay."""
    yield from _combined(
        list(_smaller_micro_batches(plan)), list(_more_recompute(plan)), list(_sharding(plan)), list(_others(plan))
    )


def _runtime_changes(plan: Plan) -> Iterator[Patch]:
    """Yield the changes that the launcher may make by itself: mesh and host memory are the user's decision."""
    yield from _combined(list(_smaller_micro_batches(plan)), list(_more_recompute(plan)))


def _combined(*kinds: list[Patch]) -> Iterator[Patch]:
    for chosen in product(*([{}, *kind] for kind in kinds)):
        if patch := {field: value for change in chosen for field, value in change.items()}:
            yield patch


def _smaller_micro_batches(plan: Plan) -> Iterator[Patch]:
    """Yield smaller micro-batches with more accumulation, the largest first."""
    for part in range(2, plan.micro_batch + 1):
        if rows := plan.rows_by_rank:
            if all(each % part == 0 for each in rows):
                fewer = [each // part for each in rows]
                yield {"plan.micro_batches": fewer, "plan.grad_accum": plan.grad_accum * part}
        elif plan.micro_batch % part == 0:
            yield {"plan.micro_batch": plan.micro_batch // part, "plan.grad_accum": plan.grad_accum * part}


def _more_recompute(plan: Plan) -> Iterator[Patch]:
    if plan.recompute == "none":
        yield {"plan.recompute": "elementwise"}
    if plan.recompute in ("none", "elementwise"):
        yield {"plan.recompute": "selective"}
    if plan.recompute != "full":
        yield {"plan.recompute": "full"}


def _sharding(plan: Plan) -> Iterator[Patch]:
    if plan.mesh.dp > 1 and plan.sharding != "parameters" and plan.engine == "torch":
        shards = {"plan.mesh.dp_replicate": 1, "plan.mesh.dp_shard": plan.mesh.dp, "plan.sharding": "parameters"}
        yield shards if plan.comm.overlap else shards | {"plan.comm.overlap": True}  # only replicas do without it


def _others(plan: Plan) -> Iterator[Patch]:
    if plan.loss == "logits":
        yield {"plan.loss": "chunked"}
    if plan.mesh.tp > 1 and not plan.comm.regather:
        yield {"plan.comm.regather": True}
    if plan.offload == "none":
        yield {"plan.offload": "activations"}
        yield {"plan.offload": "optimizer"}


def _rung(plan: Plan, patch: Patch, question: Question) -> Rung | None:
    """Return the change with its prediction; None if the changed plan cannot run."""
    try:
        changed = plan_with(plan, patch)
        check_plan(changed, question.recipe, question.spec, question.cluster, question.outline, question.facts)
    except (UserError, ValidationError):
        return None
    return Rung(patch, changed, predict(question.job, question.cluster, changed))


def _fitting(
    rungs: list[Rung], plan: Plan, question: Question, *, needed_bytes: float, device_bytes: float
) -> list[Rung]:
    present, limit = plan_bytes(predict(question.job, question.cluster, plan)), MAX_MEMORY_FRACTION * device_bytes
    return [rung for rung in rungs if plan_bytes(rung.prediction) * needed_bytes / present <= limit]


def _rule_order(patch: Patch, plan: Plan) -> tuple[int, int]:
    """Return where the change stands on the launcher's ladder: as little recompute as possible, then large batches."""
    recompute = patch.get("plan.recompute")
    level = RECOMPUTE_ORDER.index(recompute) if recompute else 0
    return level, -patch.get("plan.micro_batch", max(patch.get("plan.micro_batches", [plan.micro_batch])))


def _text(plan: Plan, changed: Plan) -> str:
    changes = []
    if changed.micro_batch != plan.micro_batch:
        changes += [f"micro-batch {plan.micro_batch} -> {changed.micro_batch}"]
        changes += [f"accumulation {plan.grad_accum} -> {changed.grad_accum}"]
    if changed.recompute != plan.recompute:
        changes += [f"recompute {plan.recompute} -> {changed.recompute}"]
    return ", ".join(changes)
