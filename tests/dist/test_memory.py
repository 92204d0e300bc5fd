"""Recompute and activation offload under every parallel axis change no bit."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from tests.cases import quick_or_slow, slow
from tests.ranks import run_ranks
from trimaran.core import Mesh, Plan
from trimaran.models import PRESETS, ModelSpec
from trimaran.nets import Network, decoder_network, initialise, local_part
from trimaran.parallel import (
    RankMesh,
    SynchronousCopies,
    apply_activation_offload,
    apply_ep,
    apply_plan,
    apply_recompute,
    autocast,
    build_mesh,
)
from trimaran.train import join_process_group, read_rank_info

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "tied": False}
DENSE = replace(PRESETS["tiny"], **SMALL)
MIXED = replace(PRESETS["tiny-moe"], **SMALL)
STAGED = replace(DENSE, layers=4)  # up to four stages
MODES: tuple[dict[str, Any], ...] = (
    {"recompute": "full"},
    {"recompute": 2},
    {"offload": "activations"},
    {"recompute": "selective", "offload": "activations"},
)  # each alone, in one process, is in tests/unit/test_parallel_memory.py


def ranks_of(mesh: Mesh) -> RankMesh:
    join_process_group(read_rank_info(os.environ))
    return build_mesh(mesh, device_type="cpu")


def tokens_here(ranks: RankMesh) -> Tensor:
    return torch.randint(0, 320, (4, 16), generator=torch.Generator().manual_seed(ranks.data_rank))


def loss_of(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    logits, balance = outputs
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") + balance


def step(network: Network, plan: Plan, ranks: RankMesh) -> list[Tensor]:
    """Return this rank's gradient shards of two micro-batches in flight, and their loss."""
    with autocast(plan, torch.device("cpu")):
        losses = [
            loss_of(network.forward({"tokens": tokens}), network.context.shard(tokens))
            for tokens in tokens_here(ranks).chunk(2)
        ]
    for loss in losses:
        loss.backward()
    grads = [each.grad for each in network.module.parameters()]
    assert all(each is not None for each in grads)
    return [torch.stack(losses).detach(), *(local_part(each) for each in grads if each is not None)]


def assert_modes_change_no_bit(build: Callable[[Plan], list[Tensor]], plan: Plan) -> None:
    expected = build(plan)
    for mode in MODES:
        for ours, theirs in zip(build(plan.model_copy(update=mode)), expected, strict=True):
            assert torch.equal(ours, theirs), mode


def every_mode(spec: ModelSpec, plan: Plan) -> int:
    ranks = ranks_of(plan.mesh)

    def build(plan: Plan) -> list[Tensor]:
        network = decoder_network(spec)
        initialise(network.module, seed=0, spec=spec)
        apply_plan(network, plan, ranks)
        return step(network, plan, ranks)

    with counted_copies() as copied:
        assert_modes_change_no_bit(build, plan)
    return len(copied)


@contextmanager
def counted_copies() -> Iterator[list[int]]:
    """Record the bytes of every copy to the host, so a test can check that something was offloaded."""
    to_host, copied = SynchronousCopies.to_host, []

    def counting(copies: SynchronousCopies, source: Tensor) -> tuple[Tensor, Any]:
        copied.append(source.nbytes)
        return to_host(copies, source)

    SynchronousCopies.to_host = counting  # pyrefly: ignore[bad-assignment]
    yield copied
    SynchronousCopies.to_host = to_host


PLANS: dict[str, tuple[ModelSpec, Plan]] = {
    "replicated": (DENSE, Plan(mesh=Mesh(dp_replicate=2))),
    "sharded": (DENSE, Plan(mesh=Mesh(dp_shard=2), sharding="parameters")),
    "sharded-bf16": (DENSE, Plan(mesh=Mesh(dp_shard=2), sharding="parameters", precision="bf16")),
    "sharded-mixed": (MIXED, Plan(mesh=Mesh(dp_shard=2), sharding="parameters")),
    "gradients": (DENSE, Plan(mesh=Mesh(dp_shard=2), sharding="gradients")),
    "tp": (DENSE, Plan(mesh=Mesh(tp=2))),
    "tp-bf16": (DENSE, Plan(mesh=Mesh(tp=2), precision="bf16")),
    "tp-sharded": (DENSE, Plan(mesh=Mesh(tp=2, dp_shard=2), sharding="parameters")),
    "cp": (DENSE, Plan(mesh=Mesh(cp=2))),
}


@pytest.mark.parametrize("name", quick_or_slow(PLANS, ("sharded-mixed", "tp").__contains__))
def test_no_mode_changes_a_bit_of_a_sharded_network(name: str) -> None:
    spec, plan = PLANS[name]
    for num_away in run_ranks(plan.mesh.world_size, every_mode, spec, plan):
        assert num_away > 0


def uneven_experts() -> None:
    plan = Plan(mesh=Mesh(dp_replicate=2, ep=2))
    ranks = ranks_of(plan.mesh)

    def build(plan: Plan) -> list[Tensor]:
        network = decoder_network(MIXED)
        initialise(network.module, seed=0, spec=MIXED)
        for apply in (apply_ep, apply_recompute, apply_activation_offload):
            apply(network, plan, ranks)
        return step(network, plan, ranks)

    assert_modes_change_no_bit(build, plan)


def test_no_mode_changes_a_bit_of_experts_with_uneven_token_counts() -> None:
    run_ranks(2, uneven_experts)


SCHEDULES: dict[str, tuple[Any, Callable[[int], list[int]]]] = {
    "gpipe": (ScheduleGPipe, lambda rank: [rank]),
    "1f1b": (Schedule1F1B, lambda rank: [rank]),
    "interleaved": (ScheduleInterleaved1F1B, lambda rank: [rank, rank + 2]),
    "zero-bubble": (ScheduleZBVZeroBubble, lambda rank: [rank, 3 - rank]),
}


def train_pipeline(name: str, modes: tuple[dict[str, Any], ...]) -> None:
    ranks = ranks_of(Mesh(pp=2))
    schedule, stages_of = SCHEDULES[name]
    numbers = stages_of(dist.get_rank())
    num_stages = 2 * len(numbers)
    tokens = torch.randint(0, 320, (8, 16), generator=torch.Generator().manual_seed(1))

    def stages(mode: dict[str, Any]) -> Iterator[Network]:
        for number in numbers:
            each = STAGED.layers // num_stages
            network = decoder_network(STAGED, range(number * each, (number + 1) * each))
            initialise(network.module, seed=0, spec=STAGED)
            apply_plan(network, Plan(mesh=Mesh(pp=2), **mode), ranks)
            yield network

    def build(mode: dict[str, Any]) -> list[Tensor]:
        networks = list(stages(mode))
        staged = [
            PipelineStage(network.module, number, num_stages, torch.device("cpu"), group=ranks.group("pp"))
            for number, network in zip(numbers, networks, strict=True)
        ]
        runner = schedule(
            staged if len(staged) > 1 else staged[0], n_microbatches=4, loss_fn=loss_of, scale_grads=False
        )
        runner.step(tokens=tokens, target=tokens, return_outputs=False)
        gradients = []
        for network in networks:
            for each in network.module.parameters():
                assert each.grad is not None
                gradients.append(each.grad)
        return gradients

    expected = build({})
    for mode in modes:
        for ours, theirs in zip(build(mode), expected, strict=True):
            assert torch.equal(ours, theirs), mode


@pytest.mark.parametrize("name", [slow("gpipe"), slow("1f1b"), "interleaved"])
def test_no_mode_changes_a_bit_of_a_pipeline(name: str) -> None:
    run_ranks(2, train_pipeline, name, MODES)


def test_offload_works_with_a_split_backward() -> None:
    run_ranks(2, train_pipeline, "zero-bubble", ({"offload": "activations"},))
