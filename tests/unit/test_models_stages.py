"""How a pipeline is split into stages, and how long its ranks wait."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from trimaran.core import Plan
from trimaran.models import (
    PRESETS,
    Outline,
    OutlineLayer,
    Tower,
    cheapest_split,
    split_by_cost,
    split_outline,
    stage_ranges,
    stages_of_rank,
)

TINY = PRESETS["tiny"]
# The cost of each action of a schedule, in thirds of a forward and backward.
COST = {"FORWARD": 1, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1, "FULL_BACKWARD": 2}
Action = tuple[int, str, int]  # stage, kind, micro-batch


def pipeline(schedule: str, *, pp: int, count: int = 8, stages: Sequence[int] = ()) -> Plan:
    return Plan.model_validate(
        {"mesh": {"pp": pp}, "pipeline": {"schedule": schedule, "stages": stages}, "grad_accum": count}
    )


def best_of_all_splits(costs: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the best of all splits: lowest maximum cost, then most equal, then fewer layers in later stages."""
    ranked = []
    for splits in itertools.combinations(range(1, len(costs)), num_stages - 1):
        bounds = list(itertools.pairwise((0, *splits, len(costs))))
        sums = [sum(costs[start:stop]) for start, stop in bounds]
        ranked.append((max(sums), sum(each**2 for each in sums), [start - stop for start, stop in bounds]))
    return tuple(-count for count in min(ranked)[2])


def test_a_frozen_tower_after_a_trained_one_has_a_backward_to_its_input() -> None:
    layer = OutlineLayer(hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256)
    first, second = (Tower(name=name, runs=((layer, 4),), hidden=64) for name in ("first", "second"))
    outline = Outline(name="both", towers=(first, replace(second, frozen=True)))
    assert [outline.passes(tower) for tower in outline.towers] == [3, 2]
    outline = Outline(name="both", towers=(replace(first, frozen=True), second))
    assert [outline.passes(tower) for tower in outline.towers] == [1, 3]
    assert split_outline(outline, 2, seq_len=64) == (5, 3)


def test_no_other_split_is_better() -> None:
    draw = random.Random(0)
    for _ in range(200):
        costs = [draw.randint(1, 9) for _ in range(draw.randint(1, 9))]
        num_stages = draw.randint(1, len(costs))
        assert cheapest_split(costs, num_stages) == best_of_all_splits(costs, num_stages)


def test_a_large_head_counts_with_its_cost() -> None:
    assert split_by_cost(PRESETS["llama-3.2-1b"], 4, seq_len=4096) == (5, 5, 5, 1)
    assert split_by_cost(PRESETS["llama-3-8b"], 4, seq_len=4096) == (9, 9, 8, 6)
    assert split_by_cost(replace(PRESETS["llama-3-8b"], vocab=320), 4, seq_len=4096) == (8, 8, 8, 8)


def test_uneven_layer_counts_give_later_stages_fewer_layers() -> None:
    assert split_by_cost(replace(TINY, layers=6, vocab=1), 4, seq_len=64) == (2, 2, 1, 1)


def test_stages_by_hand_may_be_uneven() -> None:
    plan = pipeline("1f1b", pp=2, stages=(3, 1))
    assert stage_ranges(TINY, plan, seq_len=64) == (range(3), range(3, 4))


def test_without_a_pipeline_there_is_one_stage() -> None:
    assert (Plan().num_stages, stage_ranges(TINY, Plan(), seq_len=64)) == (1, (range(4),))
    assert stages_of_rank("1f1b", 1, 0, 1) == (0,)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "held"),
    [
        ("gpipe", 4, [(0,), (1,), (2,), (3,)]),
        ("1f1b", 4, [(0,), (1,), (2,), (3,)]),
        ("interleaved", 8, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("zero-bubble", 8, [(0, 7), (1, 6), (2, 5), (3, 4)]),
    ],
)
def test_every_stage_has_one_rank(schedule: str, num_stages: int, held: list[tuple[int, ...]]) -> None:
    plan = pipeline(schedule, pp=4)
    assert plan.num_stages == num_stages
    assert [stages_of_rank(plan.pipeline.schedule, plan.mesh.pp, rank, num_stages) for rank in range(4)] == held


def test_interleaved_stages_by_hand_may_be_more_than_two_a_rank() -> None:
    plan = pipeline("interleaved", pp=2, stages=(1, 1, 1, 1, 1, 1))
    assert plan.num_stages == 6
    assert stages_of_rank(plan.pipeline.schedule, plan.mesh.pp, 1, 6) == (1, 3, 5)


def torch_order(kind: Any, *, pp: int, count: int, rounds: int) -> list[list[Action]]:
    """Return the actions of each rank in torch's order. The schedule object needs no stages for that."""
    schedule = kind.__new__(kind)
    schedule.pp_group_size, schedule._n_microbatches, schedule.n_local_stages = pp, count, rounds
    schedule.num_stages = schedule._num_stages = pp * rounds
    schedule.number_of_rounds = max(1, count // pp)
    schedule.microbatches_per_round = count // schedule.number_of_rounds
    orders = [schedule._calculate_single_rank_operations(rank) for rank in range(pp)]
    return [[(each[0], each[1].name, each[2]) for each in order if each is not None] for order in orders]


def idle_fraction(orders: list[list[Action]], *, num_stages: int) -> float:
    """Return the fraction of time that a rank waits if every action starts as soon as it can."""
    done: dict[Action, int] = {}
    clocks = [0] * len(orders)
    waiting = [list(reversed(order)) for order in orders]
    while any(waiting):
        before = len(done)
        for rank, order in enumerate(waiting):
            while order and (start := start_of(order[-1], done, num_stages)) is not None:
                stage, kind, micro_batch = order.pop()
                clocks[rank] = max(clocks[rank], start) + COST[kind]
                finished = "BACKWARD_INPUT" if kind == "FULL_BACKWARD" else kind
                done[stage, finished, micro_batch] = clocks[rank]
        assert len(done) > before, "the ranks deadlock"
    return 1 - sum(COST[kind] for _, kind, _ in orders[0]) / max(clocks)


def start_of(action: Action, done: dict[Action, int], num_stages: int) -> int | None:
    """Return when all inputs of the action are ready; None while they are not."""
    stage, kind, micro_batch = action
    if kind == "FORWARD":
        needs = [(stage - 1, "FORWARD", micro_batch)] * (stage > 0)
    elif kind == "BACKWARD_WEIGHT":
        needs = [(stage, "BACKWARD_INPUT", micro_batch)]
    else:
        later = [(stage + 1, "BACKWARD_INPUT", micro_batch)] * (stage + 1 < num_stages)
        needs = [(stage, "FORWARD", micro_batch), *later]
    return max((done[each] for each in needs), default=0) if all(each in done for each in needs) else None


@pytest.mark.parametrize(("pp", "count"), [(2, 4), (3, 6), (4, 8), (4, 12), (8, 16), (8, 40), (4, 4), (4, 5), (8, 9)])
def test_the_bubble_equals_the_wait_in_torchs_zero_bubble_order(pp: int, count: int) -> None:
    order = torch_order(schedules.ScheduleZBVZeroBubble, pp=pp, count=count, rounds=2)
    assert pipeline("zero-bubble", pp=pp, count=count).bubble == pytest.approx(idle_fraction(order, num_stages=2 * pp))


@pytest.mark.parametrize(("pp", "count", "rounds"), [(2, 4, 2), (4, 8, 2), (4, 10, 2), (4, 12, 3), (3, 9, 2)])
def test_the_bubble_equals_the_wait_in_torchs_interleaved_order(pp: int, count: int, rounds: int) -> None:
    order = torch_order(schedules.ScheduleInterleaved1F1B, pp=pp, count=count, rounds=rounds)
    plan = pipeline("interleaved", pp=pp, count=count, stages=(1,) * pp * rounds)
    assert plan.bubble == pytest.approx(idle_fraction(order, num_stages=pp * rounds))


def test_the_bubble_shrinks_with_micro_batches_and_better_schedules() -> None:
    assert pipeline("gpipe", pp=4, count=8).bubble == pipeline("1f1b", pp=4, count=8).bubble == 3 / 11
    assert pipeline("interleaved", pp=4, count=8).bubble == 3 / 19
    assert pipeline("zero-bubble", pp=4, count=8).bubble == 3 / 51
    assert pipeline("1f1b", pp=4, count=64).bubble == 3 / 67
    assert Plan(grad_accum=8).bubble == pipeline("zero-bubble", pp=1).bubble == 0
