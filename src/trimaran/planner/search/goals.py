"""Searches the space of legal plans for the best by a goal, and chooses the plan of a run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from trimaran.core import Plan, Recipe, UserError, joined, show_bytes, templated
from trimaran.cost import Memory, predict
from trimaran.machine import Cluster
from trimaran.models import HfFacts, Outline, Spec, decoder_of, outline_of, refuse_adapter, with_adapter
from trimaran.planner.hints import (
    cluster_sizes,
    first_that_fits,
    hints_for,
    least_memory_plan,
    memory_hints,
    smallest_cluster,
)
from trimaran.planner.plan_choices import choose_comm
from trimaran.planner.question import NO_BYTES, NearMiss, PlanAnswer, Question
from trimaran.planner.rules.legal import check_precision, check_sequence, check_tower_names, is_legal
from trimaran.planner.search.branch_and_bound import TIE_RATIO, FoundPlan, least_memory_plans, mesh_key_of
from trimaran.planner.search.evaluator import PlanEvaluator
from trimaran.planner.search.mixed_search import find_mixed_plans
from trimaran.planner.search.rejections import near_misses, ranked_by_risk, shortages, ties_of, too_big, warnings_for
from trimaran.planner.search.space import Space
from trimaran.planner.simple_plans import first_legal_plan

MAX_SIZES_WITHOUT_GAIN = 6  # cluster sizes in a row that are no cheaper


class SearchResult(NamedTuple):
    """The plans that fit, best first, the cluster they are for, and how many plans were evaluated."""

    ranked: list[FoundPlan]
    cluster: Cluster
    num_considered: int
    faster: Sequence[FoundPlan] = ()  # than the first, but not by enough for what they risk


def search(question: Question) -> PlanAnswer:
    """Return the plans that fit, best first, and why the others lost. The same question always gets the same answer.

    Raises UserError for pins that contradict each other, the model or the cluster.
    """
    if question.outline is None:
        return PlanAnswer(question=question, ranked=(first_legal_plan(question),), num_considered=1)
    found = best_plans(question)
    if not found.ranked:
        return nothing_fits(question, found.num_considered)
    asked = replace(question, cluster=found.cluster)
    choices = [choose_comm(each.plan, asked) for each in found.ranked[: question.max_plans]]
    ranked = tuple(predicted(each.plan, asked) for each in choices)
    faster = [predicted(each.plan, asked) for each in found.faster]
    return PlanAnswer(
        question=question,
        ranked=ranked,
        ties=tuple(ties_of(ranked, faster)) if question.goal != "memory" else (),
        misses=near_misses(ranked, asked),
        choices=choices[0].reasons,
        hints=() if found.cluster.groups else hints_for(ranked[0], asked),
        warnings=tuple(warnings_for(ranked[0], question, found.cluster)),
        num_considered=found.num_considered,
        part=found.cluster if found.cluster != question.cluster else None,
    )


def best_plans(question: Question) -> SearchResult:
    """Return the best plan of each mesh by the question's goal, best first."""
    check_tower_names(question.pins, question)  # no plan would pass with an unknown tower
    refuse_adapter(question.recipe.model, question.pins, question.spec)
    if "precision" in question.pins.model_fields_set:
        check_precision(question.pins, question.spec, question.cluster)  # before a search in which nothing passes
    if question.cluster.groups:
        ranked, num = find_mixed_plans(question, _plans_of_one_kind)
        return SearchResult(ranked, question.cluster, num)
    return _BY_GOAL[question.goal](question)


def nothing_fits(question: Question, num_considered: int = 0) -> PlanAnswer:
    """Return the answer when nothing fits: the plan with the least memory, what it lacks, and where it would fit.

    Raises UserError if the pins and not the memory rule out every plan.
    """
    # Of several kinds of devices, the one with the least memory.
    space = Space(replace(question, cluster=replace(question.cluster, groups=())))
    evaluator = PlanEvaluator(space)
    best = least_memory_plan(space, evaluator)
    plan = predicted(best.plan if best else first_legal_plan(question), question)
    assert plan.prediction is not None
    short = shortages(plan.prediction, question.cluster)
    return PlanAnswer(
        question=question,
        ranked=(),
        misses=(NearMiss(plan=plan, why=too_big(plan.prediction, question.cluster)),),
        hints=() if question.cluster.groups else memory_hints(question),
        num_considered=num_considered + evaluator.num_evaluated,
        missing_bytes=short[0].over if short else NO_BYTES,
        missing=" and ".join(f"{show_bytes(each.over)} of {each.what}" for each in short),
        smallest=None if question.cluster.groups else smallest_cluster(question),
    )


def predicted(plan: Plan, question: Question) -> Plan:
    """Return the plan, validated, with its prediction."""
    fields = {name: getattr(plan, name) for name in Plan.model_fields if name != "prediction"}
    return Plan(**fields, prediction=predict(question.job, question.cluster, plan))


def _fastest(question: Question, limit: float = math.inf) -> SearchResult:
    space = Space(question)
    evaluator = PlanEvaluator(space)
    plans, faster = ranked_by_risk(space, evaluator, limit=limit, others=question.max_plans - 1)
    return SearchResult(plans, question.cluster, evaluator.num_evaluated, faster)


def _plans_of_one_kind(question: Question) -> tuple[list[FoundPlan], int]:
    found = _fastest(question)
    return found.ranked, found.num_considered


def _least_memory(question: Question) -> SearchResult:
    space = Space(question)
    evaluator = PlanEvaluator(space)
    found: dict[tuple[int, ...], tuple[Memory, Plan]] = {}
    for plan in least_memory_plans(space):
        memory, key = evaluator.memory(plan), mesh_key_of(plan)
        is_least = key not in found or memory.device < found[key][0].device
        if evaluator.memory_use(memory) <= 1 and is_least and is_legal(plan, space.question):
            found[key] = memory, plan
    by_bytes = sorted(found.values(), key=lambda each: (each[0].device, mesh_key_of(each[1])))
    plans = [FoundPlan(evaluator.seconds(plan, memory), plan) for memory, plan in by_bytes]
    num = sum(memory.device <= TIE_RATIO * by_bytes[0][0].device for memory, _ in by_bytes)
    tied = sorted(plans[:num], key=lambda each: (each.seconds, mesh_key_of(each.plan)))
    return SearchResult([*tied, *plans[num:]], question.cluster, evaluator.num_evaluated)


def _cheapest(question: Question) -> SearchResult:
    """Return the plans that take the fewest device-seconds per step, on all devices or on fewer.

    Once a fast plan fits, more devices only communicate more. So the search stops after some sizes without a gain.
    """
    best, least, num, without_gain = SearchResult([], question.cluster, 0), math.inf, 0, 0
    for cluster in _smaller_clusters(question.cluster):
        found = _fastest(replace(question, cluster=cluster, max_plans=1), limit=least / cluster.world_size)
        num += found.num_considered
        without_gain += bool(best.ranked)
        if found.ranked and (cost := cluster.world_size * found.ranked[0].seconds) < least:
            best, least, without_gain = found, cost, 0
        if without_gain == MAX_SIZES_WITHOUT_GAIN:
            break
    shown = _fastest(replace(question, cluster=best.cluster)) if best.ranked and question.max_plans > 1 else best
    return shown._replace(num_considered=num + shown.num_considered)


def _fewest(question: Question) -> SearchResult:
    fewest = first_that_fits(question, _smaller_clusters(question.cluster))
    return _fastest(replace(question, cluster=fewest)) if fewest else SearchResult([], question.cluster, 0)


def _most_goodput(question: Question) -> SearchResult:
    """Return the plans that do the most new steps over weeks with failures; nodes that do not train are spares."""
    from trimaran.planner.reliability import by_goodput, clusters_with_spares  # noqa: PLC0415  (numpy starts slowly)

    best, least, num = SearchResult([], question.cluster, 0), math.inf, 0
    for cluster in clusters_with_spares(question):
        found = _fastest(replace(question, cluster=cluster))
        num += found.num_considered
        priced = by_goodput(found.ranked, question, cluster)
        if priced and (not best.ranked or priced[0][0] < least):
            least, best = priced[0][0], SearchResult([each for _, each in priced], cluster, 0)
    return best._replace(num_considered=num)


def _smaller_clusters(cluster: Cluster) -> list[Cluster]:
    """Return the sizes up to a cluster, smallest first: parts of a node, then nodes, then the cluster itself."""
    smaller = [each for each in cluster_sizes(cluster, most=cluster.world_size) if each.world_size < cluster.world_size]
    return [*smaller, cluster]


_BY_GOAL: dict[str, Callable[[Question], SearchResult]] = {
    "throughput": _fastest,
    "memory": _least_memory,
    "cost": _cheapest,
    "fewest-gpus": _fewest,
    "goodput": _most_goodput,
}


def choose(
    recipe: Recipe, spec: Spec | None, cluster: Cluster, outline: Outline | None = None, facts: HfFacts | None = None
) -> Plan:
    """Return the fastest legal plan with its prediction; of plans that tie, the simplest.

    Without an `outline`, or a `spec` to make one from, nothing can be predicted, and the simplest legal plan is taken.
    The same question always gets the same answer. Raises UserError for wrong pins, or if nothing fits.
    """
    check_sequence(recipe.data.seq_len, spec)
    if outline is None and (decoder := decoder_of(spec)) is not None:
        outline = outline_of(decoder)
        outline = with_adapter(outline, recipe.model.adapter) if recipe.model.adapter else outline
    question = Question(recipe=recipe, spec=spec, outline=outline, cluster=cluster, max_plans=1, facts=facts)
    if outline is None:
        return first_legal_plan(question)
    if found := best_plans(question).ranked:
        return predicted(choose_comm(found[0].plan, question).plan, question)
    raise no_fit_error(nothing_fits(question))


def no_fit_error(answer: PlanAnswer) -> UserError:
    """Return the error when nothing fits: the smallest plan, what it lacks, and what would help."""
    smallest, device = answer.misses[0].plan, answer.cluster.device.name
    assert smallest.prediction is not None
    term, size = max(smallest.prediction.memory.items(), key=lambda item: item[1])
    more = (
        templated("add devices: {smallest} is enough", smallest=answer.smallest) if answer.smallest else "add devices"
    )
    fixes = [
        more,
        *(text for hint in answer.hints if isinstance(text := hint.values["hint"], str)),
        "choose a smaller model",
    ]
    owners = {
        "device memory": templated(
            "{device}, the most for {term} ({size})", device=device, term=term, size=show_bytes(size)
        )
    }
    over = joined(
        [
            templated(
                "{over} too big for the {most} of {owners}",
                over=show_bytes(each.over),
                most=show_bytes(each.most),
                owners=owners.get(each.what, each.what),
            )
            for each in shortages(smallest.prediction, answer.cluster)
        ],
        "{first} and {last}",
    )
    return UserError("P007.no-plan-fits", where="cluster", smallest=smallest, over=over, fix=joined(fixes))
