"""The simulated step: the trainer's order of passes, the closed forms of the bubble, and contention on the network."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from tests import forked
from trimaran.core import Mesh, Pipeline, Plan
from trimaran.cost import (
    SLOWEST_RANK,
    Demands,
    Fabric,
    Job,
    NodeSpeeds,
    Order,
    Schedule,
    StageCost,
    StepCosts,
    demands_of,
    fair_share,
    node_speeds_of,
    pipeline_order,
    predict,
    sample_steps,
    simulate_step,
    step_costs_of,
    with_slower_network,
)
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, outline_of
from trimaran.runs import load_trace

FREE = Demands(card=1.0, ring_card=0.0, ring_uplink=0.0, send_card=0.0, send_uplink=0.0, ranks_per_pod=1024)
KINDS = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "input_grad",
         "BACKWARD_WEIGHT": "weight_grad"}  # fmt: skip
SHAPES: list[tuple[Schedule, int, int, int]] = [  # schedule, ranks, stages per rank, micro-batches
    ("gpipe", 4, 1, 8), ("gpipe", 2, 1, 3), ("1f1b", 4, 1, 8), ("1f1b", 8, 1, 8), ("1f1b", 2, 1, 16),
    ("interleaved", 4, 2, 8), ("interleaved", 4, 3, 12), ("interleaved", 2, 2, 4), ("interleaved", 8, 4, 16),
    ("zero-bubble", 4, 2, 8), ("zero-bubble", 2, 2, 3), ("zero-bubble", 3, 2, 12), ("zero-bubble", 4, 2, 16),
]  # fmt: skip


class RecordingStage:
    """A stage for torch's schedules that computes nothing and writes down what it is asked to compute."""

    def __init__(self, index: int, num_stages: int, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, num_stages, rank, ranks
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.has_backward, self.device, self.submod = True, torch.device("cpu"), None
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.done: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> torch.Tensor:
        self.done.append(("forward", self.stage_index, number))
        return torch.zeros(())

    def backward_one_chunk(self, number: int, **_: Any) -> None:
        self.done.append(("backward", self.stage_index, number))

    def __getattr__(self, name: str) -> Any:  # messages, preparation and reductions: nothing happens
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: []


def torchs_order(schedule: str, ranks: int, num_stages: int, count: int) -> list[list[tuple[str, int, int]]]:
    """Return the passes of each rank, by the classes that `parallel.axes.pp.build_schedule` makes."""
    options: dict[str, Any] = {"n_microbatches": count, "loss_fn": lambda loss, _: loss, "scale_grads": False}
    if schedule in ("gpipe", "1f1b"):
        found = []
        for rank in range(ranks):
            stage = RecordingStage(rank, num_stages, rank, ranks)
            made = (ScheduleGPipe if schedule == "gpipe" else Schedule1F1B)(stage, **options)  # type: ignore[arg-type]
            made.step(target=torch.zeros(count), return_outputs=False)
            found.append(stage.done)
        return found
    is_v = schedule == "zero-bubble"
    here = (0, num_stages - 1) if is_v else range(0, num_stages, ranks)
    stages: Any = [RecordingStage(index, num_stages, 0, ranks) for index in here]
    multi = (ScheduleZBVZeroBubble if is_v else ScheduleInterleaved1F1B)(stages, **options)
    return [
        [(KINDS[each.computation_type.name], each.stage_index, each.microbatch_index or 0)
         for each in multi.pipeline_order_with_comms[rank] if each.computation_type.name in KINDS]
        for rank in range(ranks)
    ]  # fmt: skip


def order_of(schedule: Schedule, ranks: int, rounds: int, count: int) -> Order:
    return pipeline_order(schedule, ranks=ranks, num_stages=ranks * rounds, micro_batches=count)


def costs_of(order: Order, *, send: float = 0.0, demands: Demands = FREE, **traffic: float) -> StepCosts:
    """Return a step whose micro-batches take 1 s forward and 2 s backward on every rank."""
    rounds, owners = order.num_stages // len(order.passes), order.rank_of_stage
    sends = tuple(0.0 if here == there else send for here, there in pairwise(owners))
    stages = (StageCost(forward=1 / rounds, backward=2 / rounds, **traffic),) * order.num_stages
    return StepCosts(order=order, stages=stages, send=sends, overlap=0.8, update=0.25, demands=demands)


@pytest.mark.parametrize(("schedule", "ranks", "rounds", "count"), SHAPES)
def test_every_rank_computes_in_the_order_of_the_trainers_schedule(
    schedule: Schedule, ranks: int, rounds: int, count: int
) -> None:
    theirs = torchs_order(schedule, ranks, ranks * rounds, count)
    ours = [[each[:3] for each in passes] for passes in order_of(schedule, ranks, rounds, count).passes]
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_the_traces_of_a_real_run_have_the_simulated_order(schedule: Schedule, tmp_path: Path) -> None:
    plan = f"plan={{mesh: {{pp: 2}}, pipeline: {{schedule: {schedule}}}, micro_batch: 1, grad_accum: 4}}"
    settings = ["cluster=2xcpu", plan, "train.global_batch=4", "train.steps=4", "data.seq_len=32",
                "train.sample.tokens=0", "train.evaluate.batches=0"]  # fmt: skip
    forked.run("trimaran", "train", "--warm", "--run-dir", str(tmp_path / "run"), "--profile", "3:4",
               "--profile-ranks", "all", *(word for each in settings for word in ("--set", each)),
               check=True, timeout=300)  # fmt: skip
    order = order_of(schedule, 2, 2 if schedule in ("interleaved", "zero-bubble") else 1, 4)
    for rank, passes in enumerate(order.passes):
        trace = load_trace(tmp_path / "run" / "profiles" / f"step-00000003-rank-{rank}.trace.json.gz")
        done = [phase for *_, phase, step in trace.host_phases if phase in ("forward", "backward") and step == 3]
        assert done == ["forward" if each.kind == "forward" else "backward" for each in passes]


@pytest.mark.parametrize(("schedule", "ranks", "rounds", "count"), SHAPES)
def test_the_bubble_of_equal_stages_is_the_closed_form(schedule: Schedule, ranks: int, rounds: int, count: int) -> None:
    order = order_of(schedule, ranks, rounds, count)
    plan = Plan(mesh=Mesh(pp=ranks), pipeline=Pipeline(schedule=schedule, stages=(1,) * order.num_stages),
                grad_accum=count)  # fmt: skip
    step = simulate_step(costs_of(order))
    assert step.bubble == pytest.approx(plan.bubble, rel=0.01)
    assert step.seconds == pytest.approx(3 * count / (1 - plan.bubble) + 0.25, rel=0.01)


def test_messages_between_stages_lengthen_a_step_as_their_schedule_sends_them() -> None:
    # GPipe and 1F1B wait for every message; an interleaved rank computes another stage meanwhile.
    lengths = {}
    for schedule, rounds in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        order = order_of(schedule, 4, rounds, 8)  # type: ignore[arg-type]
        lengths[schedule] = simulate_step(costs_of(order, send=0.1)).seconds - simulate_step(costs_of(order)).seconds
    assert lengths["gpipe"] == pytest.approx(2.0)  # 10 messages forward and as many back on the way of the last one
    assert lengths["1f1b"] == pytest.approx(1.9)
    assert lengths["interleaved"] < 1.5


@pytest.mark.parametrize(("schedule", "ranks", "rounds", "count"), SHAPES)
def test_many_steps_at_once_take_as_long_as_event_by_event(
    schedule: Schedule, ranks: int, rounds: int, count: int
) -> None:
    quiet = costs_of(order_of(schedule, ranks, rounds, count), send=0.07)
    busy = costs_of(quiet.order, send=0.07, gather=0.4, first_gather=0.1, reduce=3.0, last_reduce=0.2)
    for costs in (quiet, busy):
        equal = NodeSpeeds(ranks=ranks, num_replicas=3, nodes_per_rank=1, jitter=0.0)
        step = simulate_step(costs)
        sample = sample_steps(costs, step, equal, count=2, seed=0)
        assert sample.seconds == pytest.approx(np.full(2, step.seconds), rel=1e-9)


def test_slow_nodes_slow_every_replica_and_more_so_the_more_there_are() -> None:
    costs = costs_of(order_of("1f1b", 4, 1, 8))
    step = simulate_step(costs)
    means = [
        sample_steps(costs, step, NodeSpeeds(ranks=4, num_replicas=num, nodes_per_rank=1), count=64, seed=1).mean
        for num in (1, 16, 1024)
    ]
    assert step.seconds < means[0] < means[1] < means[2] < 1.1 * step.seconds
    again = sample_steps(costs, step, NodeSpeeds(ranks=4, num_replicas=16, nodes_per_rank=1), count=64, seed=1)
    assert again.mean == means[1]


def test_without_a_pipeline_a_step_is_what_the_cost_model_predicts() -> None:
    job = Job(outline=outline_of(PRESETS["llama-3-8b"]), seq_len=4096)
    cluster = parse_cluster("4x8xH100")
    for mesh, sharding in ((Mesh(dp_shard=32), "parameters"), (Mesh(dp_shard=4, tp=8), "optimizer")):
        plan = Plan(mesh=mesh, sharding=sharding, grad_accum=4, precision="bf16", recompute="full", compile=True)
        found = predict(job, cluster, plan)
        expected = found.step_seconds - found.exposed[SLOWEST_RANK] - found.time.get("allocator", 0.0)
        assert simulate_step(step_costs_of(job, cluster, plan)).seconds == pytest.approx(expected, rel=1e-6)


def test_flows_share_a_card_fairly() -> None:
    assert fair_share([{"card": 1.0}]) == [1.0]
    assert fair_share([{"card": 1.0}, {"card": 1.0}]) == [0.5, 0.5]
    # The third is limited by the uplink, and the first two share what it leaves of the card.
    speeds = fair_share([{"a": 1.0}, {"a": 1.0, "b": 1.0}, {"b": 1.0, "c": 4.0}])
    assert speeds == pytest.approx([0.5, 0.5, 0.25])


def test_a_reduction_and_messages_that_share_a_card_slow_each_other() -> None:
    order = order_of("interleaved", 2, 2, 4)
    shared = Demands(card=1.0, ring_card=1.0, ring_uplink=0.0, send_card=1.0, send_uplink=0.0, ranks_per_pod=2)
    apart, together = (
        simulate_step(costs_of(order, send=0.3, reduce=4.0, demands=demands)) for demands in (FREE, shared)
    )
    assert together.mean_seconds("reduce", 2, "gradients") > apart.mean_seconds("reduce", 2, "gradients")
    assert together.seconds > apart.seconds


def test_oversubscription_slows_what_leaves_a_pod_and_nothing_else() -> None:
    cluster, mesh = parse_cluster("64x8xH100"), Mesh(dp_replicate=16, tp=8, pp=4)
    pods = Fabric(pod_nodes=16, oversubscription=7.0)  # a pod holds one pipeline rank of every replica
    demands = demands_of(pods, cluster, mesh)
    assert (demands.ring_uplink, demands.ring_slowdown) == (0.0, 1.0)
    assert demands.send_slowdown(0, 1) == 7.0
    outside = demands_of(Fabric(pod_nodes=16, oversubscription=7.0, outermost="dp"), cluster, mesh)
    assert outside.send_slowdown(0, 1) == 1.0
    assert outside.ring_slowdown == pytest.approx(7 / 4)  # 4 of a ring's 16 members are in a pod: one hop in 4 leaves
    everyone = demands_of(Fabric(pod_nodes=16, oversubscription=7.0), cluster, Mesh(dp_replicate=512))
    assert everyone.ring_slowdown == 1.0  # one hop in 128 leaves the pod
    assert demands_of(Fabric(rails=2), cluster, mesh).ring_slowdown == 4.0  # four devices share a card
    slower = with_slower_network(cluster, 4.0)
    assert slower.levels[-1].bandwidth == cluster.levels[-1].bandwidth / 4


def test_a_node_that_holds_several_replicas_is_drawn_once() -> None:
    cluster = parse_cluster("64x8xH100")
    assert node_speeds_of(cluster, Mesh(dp_replicate=512)).num_replicas == 64
    wide = node_speeds_of(cluster, Mesh(dp_replicate=4, tp=8, cp=4, pp=4))
    assert (wide.num_replicas, wide.nodes_per_rank, wide.ranks) == (4, 4, 4)
