"""fp8 matmuls on several ranks: shards have their own scales and are as accurate as full layers."""

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from trimaran.core import Mesh, Plan
from trimaran.models import PRESETS
from trimaran.nets import decoder_network, initialise
from trimaran.parallel import Fp8Linear, apply_plan, autocast, build_mesh, convert_linears
from trimaran.train import join_process_group, read_rank_info

TINY = PRESETS["tiny"]
SPEC = replace(TINY, layers=1, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=512, tied=False,
               block=replace(TINY.block, qkv_bias=True))  # fmt: skip
TOKENS = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(7))
PLANS = {
    "one": Plan(precision="bf16"),
    "tp-2": Plan(precision="bf16", mesh=Mesh(tp=2)),
    "fsdp-2": Plan(precision="bf16", mesh=Mesh(dp_shard=2), sharding="parameters"),
}


def gradients_under(plan: Plan, in_fp8: bool) -> dict[str, Tensor]:
    """Return the full gradient of each parameter, and the loss, over all tokens."""
    join_process_group(read_rank_info(os.environ))
    network = decoder_network(SPEC)
    initialise(network.module, seed=0, spec=SPEC)
    if in_fp8:
        convert_linears(network)  # `apply_fp8` refuses a CPU
        assert sum(isinstance(each, Fp8Linear) for each in network.module.modules()) == 7
    apply_plan(network, plan, build_mesh(plan.mesh, device_type="cpu"))
    with torch.backends.mkldnn.flags(enabled=False), autocast(plan, torch.device("cpu")):
        logits, _ = network.forward({"tokens": TOKENS})
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        loss = F.cross_entropy(whole[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten())
        loss.backward()
    found = {name: each.grad for name, each in network.module.named_parameters() if each.grad is not None}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()} | {
        "loss": loss.detach()
    }


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    return run_ranks(1, gradients_under, PLANS["one"], False)[0]


@pytest.mark.parametrize("name", PLANS)
def test_an_fp8_step_is_close_to_a_bf16_step(plain: dict[str, Tensor], name: str) -> None:
    plan = PLANS[name]
    for ours in run_ranks(plan.mesh.world_size, gradients_under, plan, True):
        loss = ours.pop("loss")
        assert 0 < abs(loss - plain["loss"]) < 0.005 * plain["loss"]
        assert ours.keys() == plain.keys() - {"loss"}
        for parameter, gradient in ours.items():
            off = (gradient - plain[parameter]).norm() / plain[parameter].norm()
            assert off < 0.15, parameter
