"""Searches plans for a cluster with several kinds of devices.

The best plans of clusters that have one of the kinds alone are the starting points. Without a pipeline, the rows of a
micro-batch are dealt to the data ranks by what each kind takes for them. In a pipeline, layers move from the slowest
or fullest rank to others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from trimaran.core import Plan, UserError
from trimaran.cost import StageLoad, predict, rows_by_cost, stage_loads, with_rows
from trimaran.machine import refuse_mixed
from trimaran.models import stages_of_rank
from trimaran.planner.question import Question
from trimaran.planner.rules.axis_rules import divisors
from trimaran.planner.rules.legal import check_precision, is_legal
from trimaran.planner.search.branch_and_bound import TIE_RATIO, FoundPlan, mesh_key_of, num_model_axes
from trimaran.planner.search.rejections import OFFLOAD_RATIO
from trimaran.planner.search.space import MAX_LAUNCH_BOUND_TOKENS, MAX_MICRO_BATCH

NUM_STARTS = 8  # plans of each kind alone, each of another mesh
MAX_SLOWER_START = 1.5  # than the best so far: the steps of a starting point on its own kind of device
MAX_MEAN_ROWS = 4  # of a data rank, in those of the starting point; more rows are dealt more evenly
MIN_MEAN_ROWS = 8

BestPlans = Callable[[Question], tuple[Sequence[FoundPlan], int]]


def find_mixed_plans(question: Question, best_plans: BestPlans) -> tuple[list[FoundPlan], int]:
    """Return the best plan of each mesh that fits on every kind of device, and how many plans were evaluated.

    `best_plans` searches a cluster of equal devices.
    """
    if question.goal != "throughput":
        refuse_mixed(question.cluster, f"the goal {question.goal}")
    if "precision" in question.pins.model_fields_set:
        check_precision(question.pins, question.spec, question.cluster)
    starts, num_considered = _starting_points(question, best_plans)
    best: dict[tuple[int, ...], FoundPlan] = {}
    fastest = math.inf
    for start in starts:
        if start.seconds > MAX_SLOWER_START * fastest:
            break
        for plan in _adapted(start.plan, question):
            num_considered += 1
            prediction = predict(question.job, question.cluster, plan)
            if prediction.fits and is_legal(plan, question):
                found, key = FoundPlan(prediction.step_seconds, plan), mesh_key_of(plan)
                if key not in best or found.seconds < best[key].seconds:
                    best[key] = found
                    fastest = min(fastest, found.seconds)
    ranked = sorted(best.values(), key=lambda each: (each.seconds, mesh_key_of(each.plan)))
    if not ranked:
        return [], num_considered
    # First the simplest of the fastest plans. One that offloads must win by more than the error.
    plain = [each for each in ranked if each.plan.offload == "none"]
    first = plain[0] if plain and plain[0].seconds < OFFLOAD_RATIO * ranked[0].seconds else ranked[0]
    tied = [each for each in ranked if first.seconds <= each.seconds <= TIE_RATIO * first.seconds]
    same = [each for each in tied if each.plan.offload == first.plan.offload]
    chosen = min(same, key=lambda each: (num_model_axes(mesh_key_of(each.plan)), each.seconds))
    return [chosen, *(each for each in ranked if each is not chosen)][: question.max_plans], num_considered


def _starting_points(question: Question, best_plans: BestPlans) -> tuple[list[FoundPlan], int]:
    """Return the best plans of clusters with one of the kinds alone, fastest first, and how many were evaluated.

    Raises UserError if the pins do not allow a plan on any kind.
    """
    starts: dict[str, FoundPlan] = {}
    refused: list[UserError] = []
    num_considered = 0
    for group in question.cluster.groups:
        alone = replace(question, cluster=question.cluster.only(group), max_plans=NUM_STARTS)
        try:
            found, num = best_plans(alone)
        except UserError as error:  # such as a precision that this kind does not have
            refused.append(error)
            continue
        num_considered += num
        for each in found:
            key = each.plan.model_dump_json(exclude={"micro_batch", "grad_accum", "pipeline", "prediction"})
            key += each.plan.pipeline.schedule
            if key not in starts or each.seconds < starts[key].seconds:
                starts[key] = each
    if len(refused) == len(question.cluster.groups):
        raise refused[0]
    return sorted(starts.values(), key=lambda each: each.seconds), num_considered


def _adapted(start: Plan, question: Question) -> Iterator[Plan]:
    if start.mesh.pp > 1:
        yield _with_moved_layers(start, question)
        return
    if start.micro_batches:  # pinned, or measured at start
        yield start
        return
    batch, job, cluster = question.recipe.train.global_batch, question.job, question.cluster
    dp, totals = start.mesh.dp, [start.rows_at_once]
    if not question.pins.model_fields_set & {"micro_batch", "grad_accum"}:
        most = min(max(MIN_MEAN_ROWS, MAX_MEAN_ROWS * start.micro_batch), MAX_MICRO_BATCH["cuda"],
                   max(1, MAX_LAUNCH_BOUND_TOKENS * start.mesh.cp // question.positions))  # fmt: skip
        totals = [total for total in divisors(batch, most=dp * most) if total >= dp]
    for total in totals:
        plan = start.model_copy(update={"grad_accum": batch // total})
        if (rows := rows_by_cost(job, cluster, plan, total=total)) is not None:
            yield with_rows(plan, rows)


def _with_moved_layers(plan: Plan, question: Question) -> Plan:
    if question.pins.pipeline.stages or not plan.pipeline.stages:
        return plan
    job, cluster = question.job, question.cluster
    loads = stage_loads(job, cluster, plan)
    while True:
        moves = [(stage_loads(job, cluster, moved), moved) for moved in _moves(plan, loads)]
        best = min(moves, key=lambda move: _badness(move[0]), default=None)
        if best is None or _badness(best[0]) >= _badness(loads):
            return plan
        loads, plan = best


def _badness(loads: Sequence[StageLoad]) -> tuple[float, float, float]:
    """Return what is wrong with a pipeline: first memory that is missing, then its slowest rank, then its bubble."""
    excess = max(0.0, max(load.occupancy for load in loads) - 1)
    return excess, max(load.seconds for load in loads), sum(load.seconds for load in loads)


def _moves(plan: Plan, loads: Sequence[StageLoad]) -> Iterator[Plan]:
    pp, stages = plan.mesh.pp, plan.pipeline.stages
    is_over = any(load.occupancy > 1 for load in loads)
    worst = max(range(pp), key=lambda rank: loads[rank].occupancy if is_over else loads[rank].seconds)
    held = [stages_of_rank(plan.pipeline.schedule, pp, rank, len(stages)) for rank in range(pp)]
    source = max(held[worst], key=lambda stage: stages[stage])
    for rank in range(pp):
        target = min(held[rank], key=lambda stage: stages[stage])
        if rank != worst and stages[source] > 1:
            counts = [count + (stage == target) - (stage == source) for stage, count in enumerate(stages)]
            yield plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"stages": tuple(counts)})})
