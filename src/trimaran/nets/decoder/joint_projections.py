"""Computes projections of the same input as one matmul: their weights are consecutive slices of one tensor.

Parameters and their names do not change. Each parameter is a slice of one tensor, so nothing is copied to join them,
and an in-place change of a parameter changes the joint tensor. torch's compiler would concatenate the gradients of the
parts at half the memory bandwidth; on a GPU our own kernels do that. Most layers in fp32 on a CPU are computed by
`cpu_layer.py` instead.

The operators are each one matmul or one of our kernels; torch's compiler does not look inside. They have no gradients
of their own: the autograd functions call them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.nets.decoder import cpu_kernels
from trimaran.nets.operators import define_operator

Rotation = tuple[Tensor, Tensor]


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` [B, heads, T, head_dim] with RoPE applied, in the wider dtype of both."""
    front, back = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-back, front), dim=-1) * sin


def cast_if_needed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in `dtype`; compiled code of torch 2.11 loses the gradient of a function's output in a no-op cast."""
    return x if x.dtype == dtype else x.to(dtype)


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Return the tensor of which the weights are consecutive slices."""
    return weights[0].as_strided((sum([each.shape[0] for each in weights]), weights[0].shape[1]), weights[0].stride())


def _rotary_projection(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, cos: Tensor, sin: Tensor, num_rotated: int
) -> Tensor:
    """Return the joint projection of `x` [B, T, hidden], with RoPE applied to its first `num_rotated` heads."""
    packed = F.linear(x, joined(weights), None if bias is None else bias.to(x.dtype))
    if packed.is_cuda:
        from trimaran.nets.kernels.layer_parts import rotate_in_place  # noqa: PLC0415 - only a GPU has Triton

        rotate_in_place(packed, cos, sin, heads=num_rotated)
        return packed
    if cpu_kernels.is_supported(packed):
        cpu_kernels.rotate_in_place(packed, cos, sin, heads=num_rotated)
        return packed
    heads = packed.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)
    rotated = cast_if_needed(rotate_halves(heads[:, :num_rotated], cos, sin), heads.dtype)
    return torch.cat([rotated, heads[:, num_rotated:]], dim=1).transpose(1, 2).flatten(2).contiguous()


def _rotary_backward(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient [B, T, query | key | value] of a joint projection, given those of its rotated parts."""
    if query.is_cuda:
        from trimaran.nets.kernels.layer_parts import rotary_backward  # noqa: PLC0415

        return rotary_backward(query, key, value, cos, sin)
    if cpu_kernels.is_supported(query):
        return cpu_kernels.rotary_backward(query, key, value, cos, sin)
    parts = []
    for gradient in (query, key):
        front, back = (gradient.float() * sin).chunk(2, dim=-1)
        parts.append((gradient.float() * cos + torch.cat((back, -front), dim=-1)).to(gradient.dtype))
    return torch.cat([*parts, value], dim=1).transpose(1, 2).flatten(2).contiguous()


def _gated_backward(packed: Tensor, grad_inner: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `packed` [rows, gate | up], and silu(gate) * up, given the gradient of the latter."""
    if packed.is_cuda:
        from trimaran.nets.kernels.layer_parts import gated_backward  # noqa: PLC0415

        return gated_backward(packed, grad_inner)
    if cpu_kernels.is_supported(packed):
        inner, sigmoid = cpu_kernels.gated_forward(packed)
        return cpu_kernels.gated_backward(packed, sigmoid, grad_inner), inner
    gate, up = packed.float().chunk(2, dim=-1)
    sigmoid, gradient = gate.sigmoid(), grad_inner.float()
    silu = gate * sigmoid
    grad_packed = torch.cat([gradient * up * (sigmoid + silu * (1 - sigmoid)), gradient * silu], dim=-1)
    return grad_packed.to(packed.dtype), (silu * up).to(packed.dtype)


def _norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of `x` [rows, width], computed in fp32 with the weight rounded to the dtype of `x`."""
    if x.is_cuda:
        from trimaran.nets.kernels.layer_parts import norm_forward  # noqa: PLC0415

        return norm_forward(x, weight, eps)
    return F.rms_norm(x.float(), x.shape[-1:], weight.to(x.dtype).float(), eps).to(x.dtype)


def _norm_backward(
    x: Tensor, weight: Tensor, grad_residual: Tensor | None, grad_normed: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` [rows, width] and of the norm's weight, given those of the residual and the norm."""
    if x.is_cuda:
        from trimaran.nets.kernels.layer_parts import norm_backward  # noqa: PLC0415

        return norm_backward(x, weight, grad_residual, grad_normed, eps)
    if cpu_kernels.is_supported(x):
        return cpu_kernels.norm_backward(x, weight, cpu_kernels.inverse_rms(x, eps), grad_residual, grad_normed)
    value, gradient, scale = x.float(), grad_normed.float(), weight.to(x.dtype).float()
    inverse_rms = (value.square().mean(-1, keepdim=True) + eps).rsqrt()
    value, scaled = value * inverse_rms, gradient * scale
    grad_x = (scaled - value * (value * scaled).mean(-1, keepdim=True)) * inverse_rms
    if grad_residual is not None:
        grad_x = grad_residual.float() + grad_x
    return grad_x.to(x.dtype), (gradient * value).sum(0).to(weight.dtype)


# Each with the shape of its result, for torch's compiler.
define_operator(
    "joint_matmul(Tensor x, Tensor[] weights, bool transposed) -> Tensor",
    lambda x, weights, transposed: x @ (joined(weights).t() if transposed else joined(weights)),
    lambda x, weights, transposed: x.new_empty(
        len(x), sum(len(each) for each in weights) if transposed else weights[0].shape[1]
    ),
)
define_operator(
    "rotary_projection(Tensor x, Tensor[] weights, Tensor? bias, Tensor cos, Tensor sin, SymInt num_rotated) -> Tensor",
    _rotary_projection,
    lambda x, weights, bias, cos, sin, num_rotated: x.new_empty(*x.shape[:-1], sum(len(each) for each in weights)),
)
define_operator(
    "rotary_backward(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin) -> Tensor",
    _rotary_backward,
    lambda query, key, value, cos, sin: query.new_empty(
        query.shape[0], query.shape[2], (query.shape[1] + 2 * key.shape[1]) * query.shape[3]
    ),
)
define_operator(
    "gated_backward(Tensor packed, Tensor grad_inner) -> (Tensor, Tensor)",
    _gated_backward,
    lambda packed, grad_inner: (torch.empty_like(packed), torch.empty_like(grad_inner)),
)
define_operator(
    "norm_backward(Tensor x, Tensor weight, Tensor? grad_residual, Tensor grad_normed, float eps) -> (Tensor, Tensor)",
    _norm_backward,
    lambda x, weight, grad_residual, grad_normed, eps: (torch.empty_like(x), torch.empty_like(weight)),
)
define_operator(
    "norm_forward(Tensor x, Tensor weight, float eps) -> Tensor",
    _norm_forward,
    lambda x, weight, eps: torch.empty_like(x),
)


@torch.no_grad()
def join_weights(parts: Sequence[nn.Linear]) -> None:
    """Make the layers' weights consecutive rows of one new tensor. Their values do not change."""
    weights = [each.weight for each in parts]
    for each, rows in zip(weights, torch.cat(weights).split([len(each) for each in weights]), strict=True):
        each.data = rows


@contextmanager
def separate_modules(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In this context joint projections and fused norms are computed one by one, so that hooks of each module run."""
    joint = [(each, name) for each in modules for name in ("joint", "fused") if getattr(each, name, False) is True]
    for module, name in joint:
        setattr(module, name, False)
    try:
        yield
    finally:
        for module, name in joint:
            setattr(module, name, True)


def joint_swiglu(x: Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Tensor:
    """Return the SwiGLU feed-forward of `x`; `join_weights` has joined `gate` and `up`."""
    rows = x.flatten(0, -2).to(gate.weight.dtype)
    return _JointSwiGLU.apply(rows, gate.weight, up.weight, down.weight).unflatten(0, x.shape[:-1])


def rotary_projection(
    x: Tensor, parts: Sequence[nn.Linear], rotation: Rotation, heads: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys with RoPE, and values, [B, heads, T, head_dim], of `x` as views, by joined `parts`."""
    weights = [each.weight for each in parts]
    biases: list[Tensor] = [each.bias for each in parts if each.bias is not None]
    bias = torch.cat(biases) if biases else None
    return _RotaryProjection.apply(x.to(weights[0].dtype), bias, *rotation, heads, *weights)


def norm_and_residual(x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """Return `x` [..., hidden] for the residual connection, and its norm. One kernel adds their gradients."""
    assert norm.weight is not None
    assert norm.eps is not None
    return _NormAndResidual.apply(x, norm.weight, norm.eps)


class FusedNorm(torch.autograd.Function):
    """RMSNorm outside compiled code: one kernel on a GPU, where autocast would compute it in several."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        normed = gradients[0].contiguous().flatten(0, -2)
        grad_x, grad_weight = torch.ops.trimaran.norm_backward(x.flatten(0, -2), weight, None, normed, ctx.eps)
        return grad_x.view_as(x), grad_weight, None


class _NormAndResidual(torch.autograd.Function):
    """RMSNorm and the residual connection around it. Backward adds both gradients in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x.view_as(x), _norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        residual, normed = (each.contiguous().flatten(0, -2) for each in gradients)
        grad_x, grad_weight = torch.ops.trimaran.norm_backward(x.flatten(0, -2), weight, residual, normed, ctx.eps)
        return grad_x.view_as(x), grad_weight, None


class _JointSwiGLU(torch.autograd.Function):
    """Two matmuls. Backward recomputes the activation between them, because it has to read its input anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        packed = torch.ops.trimaran.joint_matmul(x, [gate, up], True)
        ctx.save_for_backward(x, gate, up, down, packed)
        if packed.is_cuda and torch.is_inference_mode_enabled():
            from trimaran.nets.kernels.layer_parts import gated_forward  # noqa: PLC0415 - only a GPU has Triton

            return gated_forward(packed) @ down.t()
        first, second = packed.chunk(2, dim=-1)
        return (F.silu(first) * second) @ down.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, ...]:
        x, gate, up, down, packed = ctx.saved_tensors
        grad_out = gradients[0].contiguous()
        grad_packed, inner = torch.ops.trimaran.gated_backward(packed, grad_out @ down)
        return *_joint_linear_backward(x, [gate, up], grad_packed), grad_out.t() @ inner


class _RotaryProjection(torch.autograd.Function):
    """One matmul for queries, keys and values. RoPE is applied to its result in place, and heads are views of it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, heads: tuple[int, int], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, cos, sin, *weights)
        ctx.bias_dtype = None if bias is None else bias.dtype
        packed = torch.ops.trimaran.rotary_projection(x, weights, bias, cos, sin, sum(heads))
        num_heads, num_kv_heads = heads
        return (
            packed.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2).split([num_heads, num_kv_heads, num_kv_heads], 1)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, cos, sin, *weights = ctx.saved_tensors
        gradient = torch.ops.trimaran.rotary_backward(*gradients, cos, sin).flatten(0, 1)
        grad_bias = None if ctx.bias_dtype is None else gradient.sum(0, dtype=ctx.bias_dtype)
        grad_x, *grad_weights = _joint_linear_backward(x.flatten(0, 1), weights, gradient)
        return grad_x.view_as(x), grad_bias, None, None, None, *grad_weights


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of `x`. The compiler fuses it with the addition before it; else it is one kernel on a GPU."""
    if x.is_cuda and not torch.compiler.is_compiling():
        return torch.ops.trimaran.norm_forward(x.flatten(0, -2), weight, eps).view_as(x)
    return cast_if_needed(F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps), x.dtype)


def _joint_linear_backward(x: Tensor, weights: Sequence[Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
    grad_weights = (grad_out.t() @ x).split([len(each) for each in weights])
    return torch.ops.trimaran.joint_matmul(grad_out, weights, False), *grad_weights
