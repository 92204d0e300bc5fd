"""4-bit base weights on a GPU: bitsandbytes' kernels, compiled blocks, and memory."""

import gc

import pytest
import torch
from torch import nn

from tests.plan_training import batch_of
from trimaran.core import Plan, Recipe
from trimaran.data import DataShare
from trimaran.nets import packed_parameters
from trimaran.parallel import build_mesh
from trimaran.train import StepClock, build_networks, build_stepper, join_process_group, read_rank_info

bitsandbytes = pytest.importorskip("bitsandbytes")
packing = pytest.importorskip("tests.unit.test_nf4_linear")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPE = {"layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 4, "head_dim": 128, "ffn": 4096}
STEPS = 4


def train(base: str, *, compiled: bool) -> tuple[list[float], int]:
    """Return the losses of a few steps, and the bytes that the network and its optimizer hold."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    adapter = {"rank": 8, "base": base, "train": ["lm_head"]}
    recipe = Recipe.model_validate(
        {
            "model": {"preset": "tiny", "shape": SHAPE | {"tied": False}, "adapter": adapter},
            "data": {"seq_len": 24},
            "train": {"steps": STEPS, "global_batch": 8, "lr": 1e-3, "seed": 3},
        }
    )
    plan = Plan(micro_batch=8, precision="bf16", compile=compiled)
    rank_info = read_rank_info({})
    if not torch.distributed.is_initialized():
        join_process_group(rank_info)
    ranks = build_mesh(plan.mesh, device_type="cuda")
    networks = build_networks(recipe, plan, rank_info, ranks)
    stepper = build_stepper(networks, recipe.train, plan, ranks, StepClock(rank_info.device))
    stepper.set_training(True)
    held = torch.cuda.memory_allocated() - before
    assert bool(packed_parameters(networks[0].module)) == (base == "4bit")
    share = DataShare(rank=0, dp=1, micro_batch=8, grad_accum=1)
    losses = []
    for step in range(STEPS):
        numbers = stepper.step(batch_of(step, share).to(rank_info.device))
        stepper.update(recipe.train.lr)
        losses.append(numbers[0].item())
    return losses, held


def test_compiled_blocks_with_a_4bit_base_train_like_uncompiled_ones_with_a_third_of_the_bytes() -> None:
    plain, held = train("4bit", compiled=False)
    compiled, _ = train("4bit", compiled=True)
    full, held_bf16 = train("auto", compiled=False)
    assert plain[-1] < plain[0]
    assert compiled == pytest.approx(plain, rel=2e-3)
    assert full == pytest.approx(plain, rel=2e-2)  # another base: rounded to 4 bits
    blocks = 4 * (1024 * (1024 + 2 * 512 + 1024) + 3 * 1024 * 4096)
    assert held_bf16 - held == pytest.approx(blocks * (2 - 0.5625), rel=0.02)


def test_a_packed_layer_computes_what_bitsandbytes_computes() -> None:
    linear = packing.frozen_linear(1024, 512).cuda().bfloat16()
    theirs = bitsandbytes.nn.Linear4bit(1024, 512, compute_dtype=torch.bfloat16, quant_type="nf4")
    weight = linear.weight.detach().cpu().clone()
    theirs.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=False)
    theirs.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    theirs.cuda()
    ours = packing.packed(linear)
    rows = [torch.randn(64, 1024, device="cuda").bfloat16().requires_grad_() for _ in range(2)]
    rows[1].data.copy_(rows[0].data)
    outputs = [layer(row) for layer, row in zip((ours, theirs), rows, strict=True)]
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(rows[0].grad, rows[1].grad, rtol=2e-2, atol=0.5)
