"""The kernels of joint projections, against their CPU implementations."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.test_nets_joint_projections import joined
from trimaran.models import PRESETS
from trimaran.nets import DecoderLayer, rotation_at

KINDS = [torch.bfloat16, torch.float32]


def close(ours: Tensor, reference: Tensor, bound: float) -> None:
    assert ours.isfinite().all()
    assert float((ours.cpu().float() - reference.float()).norm() / reference.float().norm()) < bound


def bound_of(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 4e-3


def both(operator: str, *arguments: object) -> tuple[list[Tensor], list[Tensor]]:
    """Return the operator's results on the GPU, and on the CPU."""
    call = getattr(torch.ops.trimaran, operator)
    on_gpu = [each.cuda() if isinstance(each, Tensor) else each for each in arguments]
    ours, theirs = call(*on_gpu), call(*arguments)
    return ([ours], [theirs]) if isinstance(ours, Tensor) else (list(ours), list(theirs))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(64, 8192), (7, 100), (1, 3)])
def test_backward_of_swiglu(rows: int, width: int, dtype: torch.dtype) -> None:
    packed, gradient = torch.randn(rows, 2 * width).to(dtype), torch.randn(rows, width).to(dtype)
    for ours, theirs in zip(*both("gated_backward", packed, gradient), strict=True):
        close(ours, theirs, bound_of(dtype))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(32, 8, 64), (24, 8, 128), (3, 1, 80)])
@pytest.mark.parametrize("turns", [1, 2])
def test_backward_of_rope_and_the_split_into_heads(
    heads: int, kv_heads: int, width: int, turns: int, dtype: torch.dtype
) -> None:
    query = torch.randn(2, 33, heads, width).to(dtype).transpose(1, 2)  # a layout that attention may return
    key, value = (torch.randn(2, kv_heads, 33, width).to(dtype) for _ in range(2))
    cos, sin = (torch.rand(turns, 1, 33, width // 2).repeat(1, 1, 1, 2) for _ in range(2))
    for ours, theirs in zip(*both("rotary_backward", query, key, value, cos, sin), strict=True):
        close(ours, theirs, bound_of(dtype))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(32, 8, 64), (24, 8, 128), (3, 1, 80)])
@pytest.mark.parametrize(("turns", "bias"), [(1, False), (2, True)])
def test_a_projection_with_rope_applied_in_place(
    heads: int, kv_heads: int, width: int, turns: int, bias: bool, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(2, 33, 256).to(dtype), (torch.randn((heads + 2 * kv_heads) * width, 256) / 16).to(dtype)
    weights, added = weight.cuda().split([heads * width, 2 * kv_heads * width]), torch.randn(len(weight))
    cos, sin = (torch.rand(turns, 1, 33, width // 2).repeat(1, 1, 1, 2) for _ in range(2))
    project = torch.ops.trimaran.rotary_projection
    ours = project(x.cuda(), weights, added.cuda() if bias else None, cos.cuda(), sin.cuda(), heads + kv_heads)
    close(ours, project(x, [weight], added if bias else None, cos, sin, heads + kv_heads), 2 * bound_of(dtype))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(4096, 3072), (5000, 2048), (3, 100), (1000, 768)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_backward_of_rms_norm_and_the_residual_connection(
    rows: int, width: int, has_residual: bool, dtype: torch.dtype
) -> None:
    x, residual, normed = (torch.randn(rows, width).to(dtype) for _ in range(3))
    arguments = (x, torch.rand(width), residual if has_residual else None, normed, 1e-5)
    for ours, theirs in zip(*both("norm_backward", *arguments), strict=True):
        close(ours, theirs, bound_of(dtype))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(4096, 3072), (3, 100), (1000, 768)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(2 * rows, width).to(dtype)[::2]
    for ours, theirs in zip(*both("norm_forward", x, torch.rand(width), 1e-5), strict=True):
        close(ours, theirs, bound_of(dtype))


def test_the_gradient_of_a_norm_is_the_same_in_every_run() -> None:
    x, residual, normed = (torch.randn(5000, 768, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight = torch.rand(768, device="cuda")
    first, *others = (torch.ops.trimaran.norm_backward(x, weight, residual, normed, 1e-5)[1] for _ in range(5))
    assert all(torch.equal(first, other) for other in others)


SHAPES = {"160m": (768, 12, 12, 64, 2048), "1b": (2048, 32, 8, 64, 8192), "3b": (3072, 24, 8, 128, 8192)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_joint_layer_has_the_gradients_of_separate_projections(shape: tuple[int, ...], compiled: bool) -> None:
    hidden, heads, kv_heads, head_dim, ffn = shape
    spec = replace(
        PRESETS["tiny"], hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=128
    )
    torch.manual_seed(0)
    x = torch.randn(2, 1024, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2, 1024, hidden, device="cuda", dtype=torch.bfloat16)
    rotation = rotation_at(torch.arange(1024, device="cuda")[None], spec.block.rope, head_dim)
    found = []
    separate = DecoderLayer(spec).cuda()
    for layer in (separate, joined(DecoderLayer(spec).cuda(), torch.bfloat16)):
        for ours, theirs in zip(layer.parameters(), separate.parameters(), strict=True):
            ours.data.copy_(theirs.data)
        if compiled:
            layer.compile()
        stream = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            out, *_ = layer(stream, rotation, None)
        (out * weight).sum().backward()
        found.append([out.detach(), stream.grad, *(each.grad for each in layer.parameters())])
    for theirs, ours in zip(*found, strict=True):
        assert float(theirs.float().norm()) > 0
        close(ours, theirs.cpu(), 0.02)
