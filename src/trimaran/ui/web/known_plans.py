"""A first answer within milliseconds: the plans of the last answer, fitted to what was changed and priced again.

The search over all plans takes longer. Its answer replaces this one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from trimaran.app.plan.plan_answer import PlanReport, all_plans
from trimaran.core import Mesh, Plan, UserError
from trimaran.planner import NearMiss, PlanAnswer, Question
from trimaran.planner.rules.legal import check_question
from trimaran.planner.search.goals import predicted
from trimaran.planner.search.rejections import reason_lost, too_big

MAX_MICRO_BATCHES = 4  # for each plan: as it is, and smaller ones if it does not divide the batch


def price_known_plans(question: Question, last: PlanReport) -> PlanAnswer | None:
    """Return the plans of the last answer for another question, the fastest first; None if none of them fits."""
    question = replace(question, facts=last.answer.question.facts, for_trainer=last.answer.question.for_trainer)
    if question.outline is None or question.cluster.groups:
        return None
    plans = {str(plan): plan for each, _ in all_plans(last) for plan in _fitted(each, question)}
    priced = [predicted(plan, question) for plan in plans.values() if _can_run(plan, question)]
    fitting = sorted((each for each in priced if each.prediction and each.prediction.fits), key=_seconds)
    if not fitting:
        return None
    large = [each for each in priced if each.prediction and not each.prediction.fits]
    misses = [NearMiss(plan=each, why=reason_lost(fitting[0], each, question) or "") for each in fitting[1:]]
    misses += [NearMiss(plan=each, why=too_big(each.prediction, question.cluster)) for each in large if each.prediction]
    return PlanAnswer(question=question, ranked=tuple(fitting), misses=tuple(misses), num_considered=len(priced))


def _seconds(plan: Plan) -> float:
    return plan.prediction.step_seconds if plan.prediction else 0.0


def _fitted(plan: Plan, question: Question) -> Iterator[Plan]:
    """Yield the plan with the pins, for as many ranks as the cluster has, and with the batch of the recipe."""
    pins = question.pins
    changed = {name: getattr(pins, name) for name in pins.model_fields_set & _SIMPLE}
    mesh = _resized(plan.mesh, question.cluster.world_size)
    if mesh is None or not _has(mesh, pins.mesh):
        return
    batch = question.recipe.train.global_batch
    sizes = [pins.micro_batch] if "micro_batch" in pins.model_fields_set else _halves(plan.micro_batch)
    for size in sizes:
        if batch % (size * mesh.dp) == 0:
            accumulation = batch // (size * mesh.dp)
            yield plan.model_copy(update={**changed, "mesh": mesh, "micro_batch": size, "grad_accum": accumulation,
                                          "pipeline": plan.pipeline.model_copy(update={"stages": ()})})  # fmt: skip
            return


_SIMPLE = {"sharding", "precision", "recompute", "offload", "loss", "compile"}


def _halves(size: int) -> Iterable[int]:
    return [size >> power for power in range(MAX_MICRO_BATCHES) if size >> power]


def _resized(mesh: Mesh, ranks: int) -> Mesh | None:
    """Return the mesh with more or fewer data ranks; None if the others do not divide the number of ranks."""
    rest = mesh.world_size // (mesh.dp_replicate * mesh.dp_shard)
    if ranks % rest:
        return None
    data = ranks // rest
    replicas = 1 if mesh.dp_shard > 1 and data % mesh.dp_replicate else mesh.dp_replicate
    shape = {"dp_replicate": replicas, "dp_shard": data // replicas} if mesh.dp_shard > 1 else {"dp_replicate": data}
    return mesh.model_copy(update=shape)


def _has(mesh: Mesh, pins: Mesh) -> bool:
    return all(getattr(mesh, axis) == getattr(pins, axis) for axis in pins.model_fields_set)


def _can_run(plan: Plan, question: Question) -> bool:
    try:
        check_question(plan, question)
    except UserError:
        return False
    return True
