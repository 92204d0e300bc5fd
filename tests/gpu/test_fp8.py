"""fp8 matmuls on a GPU: accuracy and memory."""

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.environment import environment
from trimaran.core import Plan, UserError
from trimaran.models import PRESETS
from trimaran.nets import Network, decoder_network, initialise
from trimaran.parallel import (
    MIN_CAPABILITY,
    RECIPE_MAJOR,
    Fp8Linear,
    as_fp8,
    autocast,
    cast_rows,
    cast_weight,
    convert_linears,
    fp8_linear,
    in_row_blocks,
    in_square_blocks,
    require_fp8_device,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < MIN_CAPABILITY, reason="a GPU without fp8"
    ),
]

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != RECIPE_MAJOR["block"],
    reason="no matmuls with these scales",
)
FORWARD, BACKWARD = 0.042, 0.065  # see tests/unit/test_fp8.py
SPEC = replace(PRESETS["tiny"], layers=2, hidden=1024, heads=16, kv_heads=4, head_dim=64, ffn=4096, tied=False)


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def relative_error(ours: Tensor | None, true: Tensor) -> float:
    assert ours is not None
    return float((ours.detach().double() - true).norm() / true.norm())


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_three_matmuls_are_close_to_the_exact_ones(compiled: bool, dtype: torch.dtype) -> None:
    layer = nn.Linear(512, 768, device="cuda", dtype=dtype)
    layer.__class__ = Fp8Linear
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    for rows in (1024, 1000):  # 1000 is not a multiple of 16
        layer.zero_grad()
        x, gradient = numbers(rows, 512).requires_grad_(), 1e-3 * numbers(rows, 768, seed=3)
        run(x).backward(gradient)
        true, weight, far = x.detach().double(), layer.weight.detach().double(), gradient.double()
        assert relative_error(run(x), true @ weight.T + layer.bias.detach()) < FORWARD
        assert relative_error(x.grad, far @ weight) < BACKWARD
        assert relative_error(layer.weight.grad, far.T @ true) < BACKWARD
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == dtype


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_nan_or_inf_is_never_hidden(bad: float) -> None:
    for spoilt in range(3):
        tensors = [numbers(64, 256), numbers(128, 256, seed=1), numbers(64, 128, seed=2)]
        tensors[spoilt][3, 5] = bad
        x, weight = tensors[0].requires_grad_(), tensors[1].requires_grad_()
        out = fp8_linear.linear(x, weight)
        out.backward(tensors[2])
        assert x.grad is not None
        assert weight.grad is not None
        assert out.isfinite().all() == (spoilt == 2)
        assert not (x.grad.isfinite().all() and weight.grad.isfinite().all())


def network_on_gpu(in_fp8: bool) -> Network:
    network = decoder_network(SPEC)
    initialise(network.module, seed=0, spec=SPEC)
    network.module.to("cuda")
    if in_fp8:
        convert_linears(network)
    for block in network.blocks:
        block.compile()
    return network


def step(network: Network, tokens: Tensor) -> Tensor:
    with autocast(Plan(precision="fp8"), torch.device("cuda")):
        logits, _ = network.forward({"tokens": tokens})
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def test_compiled_blocks_use_less_memory_than_bf16_and_never_synchronize() -> None:
    tokens = torch.randint(0, SPEC.vocab, (8, 2048), generator=torch.Generator().manual_seed(7)).cuda()
    peaks, losses, found = {}, {}, {}
    for name in ("bf16", "fp8"):
        torch._dynamo.reset()
        network = network_on_gpu(in_fp8=name == "fp8")
        step(network, tokens)
        network.module.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = step(network, tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        peaks[name], losses[name] = torch.cuda.max_memory_allocated() - before, float(loss)
        found[name] = [each.grad.double() for each in network.module.parameters() if each.grad is not None]
    assert peaks["fp8"] < peaks["bf16"], peaks
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.002)
    assert losses["fp8"] != losses["bf16"]
    for ours, theirs in zip(found["fp8"], found["bf16"], strict=True):
        assert relative_error(ours, theirs) < 0.3  # e5m2 has two mantissa bits, and errors add up over layers


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_casts_to_blocks_are_those_of_torch_bit_for_bit(dtype: torch.dtype) -> None:
    x = numbers(384, 1280, dtype=dtype)
    x[::7] *= 100
    x[:, :640] *= 1e-3
    x[130:260, 128:256] = 0
    plain, turned = cast_rows(x, False)
    host = x.cpu()  # on a GPU torch divides by a number as it multiplies with its reciprocal
    pairs = [(plain, in_row_blocks(host)), (turned, in_row_blocks(host.t()))]
    pairs += [(cast_rows(x, False, turned=False)[0], plain), (cast_rows(x, False, plain=False)[1], turned)]
    pairs += [(cast_weight(x), in_square_blocks(host)), (cast_weight(x, turned=True), in_square_blocks(host.t()))]
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours.values.view(torch.uint8).cpu(), theirs.values.view(torch.uint8).cpu())
        assert torch.equal(ours.scales.cpu(), theirs.scales.cpu())
    assert plain is not None
    assert plain.scales.t().is_contiguous()  # as cuBLAS reads them, so that nothing is copied


@on_hopper
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_blocks_are_as_exact_in_backward_as_in_forward(compiled: bool) -> None:
    layer = nn.Linear(512, 768, device="cuda")
    as_fp8(layer, "block")
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    for rows in (1024, 1000):
        layer.zero_grad()
        x, gradient = numbers(rows, 512).requires_grad_(), 1e-3 * numbers(rows, 768, seed=3)
        out = run(x)
        out.backward(gradient)
        true, weight, far = x.detach().double(), layer.weight.detach().double(), gradient.double()
        assert relative_error(out, true @ weight.T + layer.bias.detach()) < FORWARD
        assert relative_error(x.grad, far @ weight) < FORWARD
        assert relative_error(layer.weight.grad, far.T @ true) < FORWARD


@on_hopper
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_nan_or_inf_in_a_block_is_never_hidden(bad: float) -> None:
    for spoilt in range(3):
        tensors = [numbers(128, 256), numbers(128, 256, seed=1), numbers(128, 128, seed=2)]
        tensors[spoilt][3, 5] = bad
        x, weight = tensors[0].requires_grad_(), tensors[1].requires_grad_()
        out = fp8_linear.linear(x, weight, "block")
        out.backward(tensors[2])
        assert x.grad is not None
        assert weight.grad is not None
        assert out.isfinite().all() == (spoilt == 2)
        assert not (x.grad.isfinite().all() and weight.grad.isfinite().all())


@on_hopper
def test_mx_is_refused_with_its_reason() -> None:
    with pytest.raises(UserError, match="P113") as refused:
        require_fp8_device("cuda", "mx")
    assert torch.cuda.get_device_name() in refused.value.what
    assert "Blackwell" in refused.value.what
    assert "tensor" in refused.value.fix


@on_hopper
def test_ranks_of_one_gpu_gather_in_fp8_over_nccl() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.nccl_fp8"]
    done = subprocess.run(command, env=environment(OMP_NUM_THREADS="1"), timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("equal") == 3
