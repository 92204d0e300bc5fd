"""The bytes that a rank really holds with an adapter are those of the cost model."""

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.cases import slow
from tests.parity import plan_for
from tests.plan_training import SEQ_LEN, batch_of, recipe_of
from tests.ranks import run_ranks
from trimaran.core import Plan, Recipe
from trimaran.cost import Job, memory_inputs_of, parts_of, states_of
from trimaran.data import DataShare
from trimaran.machine import Cluster, find_device
from trimaran.models import outline_for
from trimaran.parallel import build_mesh
from trimaran.train import StepClock, TorchStepper, build_networks, build_stepper, join_process_group, read_rank_info

# Every dimension is even, so that shards are equal, and rows of 64 can be packed.
SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "tied": False}
DENSE, MIXTURE = {"preset": "tiny", "shape": SHAPE}, {"preset": "tiny-moe", "shape": SHAPE}


def bytes_of(tensors: Iterable[Tensor]) -> int:
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.numel() * each.element_size() for each in local)


def held_bytes(recipe: Recipe, plan: Plan) -> tuple[int, dict[str, int]]:
    """Return this rank's pipeline rank, and the bytes of its weights, gradients and moments after a backward."""
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    ranks = build_mesh(plan.mesh, device_type="cpu")
    networks = build_networks(recipe, plan, rank_info, ranks)
    stepper = build_stepper(networks, recipe.train, plan, ranks, StepClock(torch.device("cpu")))
    share = DataShare(rank=ranks.data_rank, dp=plan.mesh.dp, micro_batch=plan.micro_batch, grad_accum=plan.grad_accum)
    stepper.step(batch_of(0, share).to(torch.device("cpu")))
    parameters = [each for network in networks for each in network.module.parameters()]
    assert isinstance(stepper, TorchStepper)
    lower_halves = stepper.updater.split_weights.lower_halves.values()
    gradients = [each.grad for each in parameters if each.grad is not None]
    stepper.update(recipe.train.lr)
    state = stepper.state(recipe.train)
    state.gather()
    moments = []
    for each in state.shards():
        if each.key.startswith("optimizer/exp_avg"):
            assert isinstance(each.tensor, Tensor)
            moments.append(each.tensor)
    dist.barrier()
    pp_rank = ranks.rank("pp") if plan.mesh.pp > 1 else 0
    held = {
        "weights": bytes_of([*parameters, *lower_halves]),
        "gradients": bytes_of(gradients),
        "optimizer": bytes_of(moments),
    }
    return pp_rank, held


CASES = [
    (DENSE, {}, {"precision": "bf16"}),
    (DENSE, {"kind": "dora", "train": ["lm_head"]}, {"dp_shard": 2, "precision": "bf16", "grad_accum": 2}),
    slow((DENSE, {}, {"tp": 2})),
    slow((DENSE, {}, {"dp_shard": 2, "tp": 2, "precision": "bf16"})),
    slow((DENSE, {"base": "4bit"}, {"dp_shard": 2, "precision": "bf16"})),
    slow((DENSE, {"targets": ["q_proj", "v_proj"]}, {"pp": 2, "grad_accum": 4, "precision": "bf16"})),
    slow((MIXTURE, {}, {"dp_shard": 2, "precision": "bf16"})),
]


@pytest.mark.parametrize(
    ("model", "adapter", "fields"), CASES, ids=lambda part: str({k: v for k, v in part.items() if k != "shape"})
)
def test_a_rank_holds_the_predicted_bytes(
    model: dict[str, Any], adapter: dict[str, Any], fields: dict[str, Any]
) -> None:
    recipe = recipe_of(model, adapter)
    plan = plan_for(recipe, **{"grad_accum": 1} | fields)
    outline = outline_for(recipe.model)
    inputs = memory_inputs_of(Job(outline=outline, seq_len=SEQ_LEN), Cluster(device=find_device("H200")), plan)
    parts = parts_of(outline, plan, seq_len=SEQ_LEN)
    held = run_ranks(plan.mesh.world_size, held_bytes, recipe, plan)
    states = [states_of(inputs, parts[pp_rank]) for pp_rank, _ in held]
    # Over all ranks together, because FSDP gives a matrix of one row to the first rank.
    assert sum(each["weights"] for _, each in held) == pytest.approx(
        sum(each.weights + each.masters for each in states)
    )
    for term in ("gradients", "optimizer"):
        assert sum(each[term] for _, each in held) == pytest.approx(sum(getattr(each, term) for each in states))
