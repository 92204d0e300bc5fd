"""Which plan: the whole space of legal plans, searched for the best by a goal."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from trimaran.core import Plan, show_bytes
from trimaran.cost import predict
from trimaran.hardware import Cluster
from trimaran.planner.branch_and_bound import ALIKE, FoundPlan, allowed, find, lean_plans, mesh_key_of
from trimaran.planner.evaluator import Evaluator
from trimaran.planner.generic_rules import check_names
from trimaran.planner.hints import hints_for, ways_out
from trimaran.planner.least_memory import LeastMemory, first_that_fits, leanest, sizes, smallest_cluster
from trimaran.planner.question import NOTHING, NearMiss, PlanAnswer, Question
from trimaran.planner.rejections import misses_of, shortages, too_big, warnings_for
from trimaran.planner.simple_plans import first_way
from trimaran.planner.space import Space

VAIN_SIZES = 6  # parts of a cluster in a row that were no cheaper


class Result(NamedTuple):
    """The plans that fit, best first, on which cluster, and how many were weighed."""

    ranked: list[FoundPlan]
    cluster: Cluster
    num_considered: int


def search(question: Question) -> PlanAnswer:
    """Return the plans that fit, best first, and why the others lost. The same question always gets the same answer.

    Raises UserError for pins that contradict each other, the model or the cluster.
    """
    if question.outline is None:
        return PlanAnswer(question=question, ranked=(first_way(question),), num_considered=1)
    found = best_plans(question)
    if not found.ranked:
        return nothing_fits(question, found.num_considered)
    asked = replace(question, cluster=found.cluster)
    ranked = tuple(predicted(each.plan, asked) for each in found.ranked[: question.most_shown])
    return PlanAnswer(
        question=question,
        ranked=ranked,
        misses=misses_of(ranked, asked),
        hints=hints_for(ranked[0], asked),
        warnings=warnings_for(ranked[0], question, found.cluster),
        num_considered=found.num_considered,
        part=found.cluster if found.cluster != question.cluster else None,
    )


def best_plans(question: Question) -> Result:
    """Return the plans that fit, best by the question's goal first, one of each mesh."""
    check_names(question.pins, question)  # which no plan would pass: there is nothing to search for
    return _BY_GOAL[question.goal](question)


def nothing_fits(question: Question, num_considered: int = 0) -> PlanAnswer:
    """Return the answer when nothing fits: the leanest plan, what it lacks, and where it would fit.

    Raises what is wrong with the pins where it is not memory that no plan is left.
    """
    space = Space(question)
    scales = Evaluator(space)
    lean = leanest(space, scales)
    plan = predicted(lean.plan if lean else first_way(question), question)
    assert plan.prediction is not None
    short = shortages(plan.prediction, question.cluster)
    return PlanAnswer(
        question=question,
        ranked=(),
        misses=(NearMiss(plan=plan, why=too_big(plan.prediction, question.cluster)),),
        hints=ways_out(question),
        num_considered=num_considered + scales.num_weighed,
        missing_bytes=short[0].over if short else NOTHING,
        missing=" and ".join(f"{show_bytes(each.over)} of {each.what}" for each in short),
        smallest=smallest_cluster(question),
    )


def predicted(plan: Plan, question: Question) -> Plan:
    """Return the plan, validated, with its prediction."""
    fields = {name: getattr(plan, name) for name in Plan.model_fields if name != "prediction"}
    return Plan(**fields, prediction=predict(question.job, question.cluster, plan))


def _fastest(question: Question, limit: float = math.inf) -> Result:
    space = Space(question)
    scales = Evaluator(space)
    finds = find(space, scales, limit=limit, others=question.most_shown - 1)
    return Result(finds.ranked(), question.cluster, scales.num_weighed)


def _leanest(question: Question) -> Result:
    """Return the plans that need least of their device; of those that are alike, the fastest first."""
    space = Space(question)
    scales = Evaluator(space)
    found: dict[tuple[int, ...], LeastMemory] = {}
    for plan in lean_plans(space):
        memory = scales.memory(plan)
        known = found.get(key := mesh_key_of(plan))
        lean = LeastMemory(scales.strain(memory), plan, memory)
        if lean.strain <= 1 and (known is None or memory.device < known.memory.device) and allowed(space, plan):
            found[key] = lean
    by_bytes = sorted(found.values(), key=lambda each: (each.memory.device, mesh_key_of(each.plan)))
    plans = [FoundPlan(scales.seconds(each.plan, each.memory), each.plan) for each in by_bytes]
    num = sum(each.memory.device <= ALIKE * by_bytes[0].memory.device for each in by_bytes)
    alike = sorted(plans[:num], key=lambda each: (each.seconds, mesh_key_of(each.plan)))
    return Result([*alike, *plans[num:]], question.cluster, scales.num_weighed)


def _cheapest(question: Question) -> Result:
    """Return the plans that take the fewest device-seconds a step: on all devices, or on fewer.

    Once there is room for a quick plan more devices only talk more: after some sizes that are no cheaper none is tried.
    """
    best, least, num, vain = Result([], question.cluster, 0), math.inf, 0, 0
    for cluster in _parts(question.cluster):
        found = _fastest(replace(question, cluster=cluster, most_shown=1), limit=least / cluster.world_size)
        num += found.num_considered
        vain += bool(best.ranked)
        if found.ranked and (cost := cluster.world_size * found.ranked[0].seconds) < least:
            best, least, vain = found, cost, 0
        if vain == VAIN_SIZES:
            break
    beside = _fastest(replace(question, cluster=best.cluster)) if best.ranked and question.most_shown > 1 else best
    return beside._replace(num_considered=num + beside.num_considered)


def _fewest(question: Question) -> Result:
    """Return the fastest plans on the fewest devices on which any fits."""
    fewest = first_that_fits(question, _parts(question.cluster))
    return _fastest(replace(question, cluster=fewest)) if fewest else Result([], question.cluster, 0)


def _parts(cluster: Cluster) -> list[Cluster]:
    """Return the parts of a cluster, smallest first: of one node, then whole nodes; last the cluster itself."""
    smaller = [each for each in sizes(cluster, most=cluster.world_size) if each.world_size < cluster.world_size]
    return [*smaller, cluster]


_BY_GOAL: dict[str, Callable[[Question], Result]] = {
    "throughput": _fastest,
    "memory": _leanest,
    "cost": _cheapest,
    "fewest-gpus": _fewest,
}
