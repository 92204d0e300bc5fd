"""Projections of the same input as one matmul."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from trimaran.models import PRESETS, ModelSpec
from trimaran.nets import (
    Attention,
    AttentionScope,
    Context,
    DecoderLayer,
    FeedForward,
    RMSNorm,
    rotation_at,
    separate_modules,
)


def joined(module: DecoderLayer, dtype: torch.dtype, *, fused: bool = False) -> DecoderLayer:
    """Return the module with its joint projections as slices of one tensor, all matrices in `dtype`."""
    for weight in module.parameters():
        if weight.ndim > 1:
            weight.data = weight.data.to(dtype)
    for each in module.modules():
        if isinstance(each, Attention | FeedForward) and each.projections:
            each.join_projections()
        if isinstance(each, DecoderLayer):
            each.joint, each.fused = True, fused
    return module


def run(layer: nn.Module, x: Tensor, spec: ModelSpec, scope: AttentionScope = None) -> tuple[Tensor, list[Tensor]]:
    rotation = rotation_at(torch.arange(x.shape[1])[None], spec.block.rope, spec.head_dim)
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.bfloat16):
        out, *_ = layer(x, rotation, scope)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weight).sum().backward()
    gradients = []
    for each in (x, *layer.parameters()):
        assert each.grad is not None
        gradients.append(each.grad.float())
    return out.detach(), gradients


def pair(spec: ModelSpec, dtype: torch.dtype, *, fused: bool = False) -> tuple[DecoderLayer, DecoderLayer]:
    torch.manual_seed(0)
    separate, joint = DecoderLayer(spec), DecoderLayer(spec)
    for name, each in separate.named_parameters():
        if "norm" in name:
            nn.init.uniform_(each, 0.5, 1.5)
    joint.load_state_dict(separate.state_dict())
    return separate, joined(joint, dtype, fused=fused)


@pytest.mark.parametrize(("name", "compiled"), [("tiny", False), ("qwen2.5-0.5b", False), ("qwen2.5-0.5b", True)])
def test_a_joint_layer_equals_separate_projections(name: str, compiled: bool) -> None:
    spec = small(PRESETS[name])
    separate, joint = pair(spec, torch.float32)
    if compiled:
        joint.compile(backend="aot_eager")
    x = torch.randn(2, 16, spec.hidden)
    (out, gradients), (joint_out, joint_gradients) = run(separate, x, spec), run(joint, x, spec)
    assert torch.allclose(joint_out, out, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(joint_gradients, gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["tiny", "qwen2.5-0.5b"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_fused_layer_equals_separate_modules(name: str, packed: bool) -> None:
    spec = small(PRESETS[name])
    separate, fused = pair(spec, torch.float32, fused=True)
    assert (separate.self_attn.q_proj.bias is not None) == (name != "tiny")
    for module in (fused.self_attn, fused.mlp, fused.self_attn.o_proj, fused.input_layernorm):
        module.register_forward_hook(lambda *_: pytest.fail("a fused layer does not call its modules"))
    x = torch.randn(2, 16, spec.hidden)
    scope = Context().scope(torch.tensor([[0] * 5 + [1] * 11, [0] * 16])) if packed else None
    (out, gradients), (fused_out, fused_gradients) = run(separate, x, spec, scope), run(fused, x, spec, scope)
    assert relative(fused_out, out) < 1e-6
    for ours, theirs in zip(fused_gradients, gradients, strict=True):
        assert relative(ours, theirs) < 2e-6


def test_separate_modules_runs_the_hooks_of_each_and_restores_the_layer() -> None:
    spec, called = small(PRESETS["tiny"]), []
    _, layer = pair(spec, torch.float32, fused=True)
    for name, each in layer.named_modules():
        each.register_forward_hook(lambda *_, name=name: called.append(name))
    x = torch.randn(1, 4, spec.hidden)
    fused, _ = run(layer, x, spec)
    assert called == [""]
    with separate_modules(layer.modules()):
        separate, _ = run(layer, x, spec)
    assert {*called} == {name for name, _ in layer.named_modules()}
    assert relative(fused, separate) < 1e-6
    assert layer.fused
    assert layer.joint
    assert layer.self_attn.joint


def test_in_half_precision_it_differs_only_by_rounding() -> None:
    spec = small(PRESETS["tiny"])
    separate, joint = pair(spec, torch.bfloat16)
    x = torch.randn(2, 16, spec.hidden).to(torch.bfloat16)
    (out, gradients), (joint_out, joint_gradients) = run(separate, x, spec), run(joint, x, spec)
    assert relative(joint_out.float(), out.float()) < 0.01
    for ours, theirs in zip(joint_gradients, gradients, strict=True):
        assert relative(ours, theirs) < 0.02


def test_an_in_place_change_of_a_parameter_changes_the_joint_weight() -> None:
    spec = small(PRESETS["tiny"])
    _, joint = pair(spec, torch.float32)
    x = torch.randn(1, 4, spec.hidden)
    before, _ = run(joint, x, spec)
    with torch.no_grad():
        joint.get_parameter("mlp.up_proj.weight").zero_()
    after, _ = run(joint, x, spec)
    assert not torch.equal(before, after)
    assert [name for name, _ in joint.named_parameters()] == [name for name, _ in DecoderLayer(spec).named_parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_norm_equals_the_plain_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    found = []
    x, weight = torch.randn(3, 5, 16).to(dtype), torch.randn(3, 5, 16).to(dtype)
    for fused in (False, True):
        norm, stream = RMSNorm(16, eps=1e-5), x.clone().requires_grad_()
        norm.fused = fused
        nn.init.uniform_(norm.weight, generator=torch.Generator().manual_seed(1))
        out = norm(stream)
        (out * weight).sum().backward()
        assert stream.grad is not None
        assert norm.weight.grad is not None
        found.append([out.detach().float(), stream.grad, norm.weight.grad])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert relative(ours.float(), theirs.float()) < (1e-6 if dtype == torch.float32 else 0.01)


def operator_arguments() -> dict[str, tuple[object, ...]]:
    torch.manual_seed(0)
    rows, weights = torch.randn(6, 8), [torch.randn(12, 8)]  # only one: the check copies each argument
    heads, cos, sin = torch.randn(2, 2, 3, 4), torch.rand(1, 1, 3, 4), torch.rand(1, 1, 3, 4)
    return {
        "joint_matmul": (rows, weights, True),
        "rotary_projection": (rows.view(2, 3, 8), weights, torch.randn(12), cos, sin, 2),
        "rotary_backward": (heads, heads[:, :1], heads[:, 1:], cos, sin),
        "gated_backward": (rows, torch.randn(6, 4)),
        "norm_forward": (rows, torch.rand(8), 1e-5),
        "norm_backward": (rows, torch.rand(8), torch.randn(6, 8), torch.randn(6, 8), 1e-5),
    }


@pytest.mark.parametrize("name", operator_arguments())
def test_the_compiler_is_told_the_truth_about_each_operator(name: str) -> None:
    operator = getattr(torch.ops.trimaran, name).default
    torch.library.opcheck(operator, operator_arguments()[name], test_utils=("test_schema", "test_faketensor"))


def small(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=128)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())
