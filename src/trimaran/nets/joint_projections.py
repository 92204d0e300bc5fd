"""Computes projections of the same input as one matmul: their weights are consecutive slices of one tensor.

Parameters and their names do not change. Each parameter is a slice of one tensor, so nothing is copied to join them,
and an in-place change of a parameter changes the joint tensor. torch's compiler would concatenate the gradients of the
parts at half the memory bandwidth; on a GPU our own kernels do that.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]


def joint_slices(parts: Sequence[nn.Linear], dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each layer's weight with new memory for it: consecutive rows of one new tensor."""
    rows = [len(each.weight) for each in parts]
    joint = torch.empty(sum(rows), parts[0].in_features, dtype=dtype, device=parts[0].weight.device)
    yield from zip((each.weight for each in parts), joint.split(rows), strict=True)


def joint_linear(x: Tensor, parts: Sequence[nn.Linear]) -> Tensor:
    """Return the outputs of the layers for `x`, concatenated in the last dim. Their weights are `joint_slices`."""
    rows = x.flatten(0, -2).to(parts[0].weight.dtype)
    out = _JointLinear.apply(rows, *(each.weight for each in parts)).unflatten(0, x.shape[:-1])
    biases: list[Tensor] = [each.bias for each in parts if each.bias is not None]
    return out + torch.cat(biases).to(out.dtype) if biases else out


def joint_swiglu(x: Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Tensor:
    """Return the SwiGLU feed-forward of `x`. The weights of `gate` and `up` are `joint_slices`."""
    rows = x.flatten(0, -2).to(gate.weight.dtype)
    return _JointSwiGLU.apply(rows, gate.weight, up.weight, down.weight).unflatten(0, x.shape[:-1])


def rotary_heads(packed: Tensor, rotation: Rotation, heads: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys with RoPE applied, and values, each [B, heads, T, head_dim].

    `packed` is [B, T, query | key | value]; `heads` are the numbers of query heads and of key heads.
    """
    return _RotaryHeads.apply(packed, *rotation, *heads)


def norm_and_residual(x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """Return `x` [..., hidden] for the residual connection, and its norm. One kernel adds their gradients."""
    assert norm.weight is not None
    assert norm.eps is not None
    return _NormAndResidual.apply(x, norm.weight, norm.eps)


class _NormAndResidual(torch.autograd.Function):
    """RMSNorm and the residual connection around it. Backward adds both gradients in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x.view_as(x), _cast(F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps), x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        residual, normed = (each.contiguous().flatten(0, -2) for each in gradients)
        grad_x, grad_weight = torch.ops.trimaran.norm_backward(x.flatten(0, -2), weight, residual, normed, ctx.eps)
        return grad_x.view_as(x), grad_weight, None


class _JointLinear(torch.autograd.Function):
    """One matmul for several linear layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return torch.ops.trimaran.joint_matmul(x, weights, True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        return _joint_linear_backward(x, weights, gradients[0].contiguous())


class _JointSwiGLU(torch.autograd.Function):
    """Two matmuls. Backward recomputes the activation between them, because it has to read its input anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        packed = torch.ops.trimaran.joint_matmul(x, [gate, up], True)
        ctx.save_for_backward(x, gate, up, down, packed)
        first, second = packed.chunk(2, dim=-1)
        return (F.silu(first) * second) @ down.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, ...]:
        x, gate, up, down, packed = ctx.saved_tensors
        grad_out = gradients[0].contiguous()
        grad_packed, inner = torch.ops.trimaran.gated_backward(packed, grad_out @ down)
        return *_joint_linear_backward(x, [gate, up], grad_packed), grad_out.t() @ inner


class _RotaryHeads(torch.autograd.Function):
    """Splits the joint projection into heads and applies RoPE."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        width = packed.shape[-1] // (heads + 2 * kv_heads)
        parts = packed.unflatten(-1, (-1, width)).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
        query, key = (_rotate(each, cos, sin) for each in parts[:2])
        return query, key, parts[2].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return torch.ops.trimaran.rotary_backward(*gradients, cos, sin), None, None, None, None


def _joint_linear_backward(x: Tensor, weights: Sequence[Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the input and the weights of a joint matmul."""
    grad_weights = (grad_out.t() @ x).split([len(each) for each in weights])
    return torch.ops.trimaran.joint_matmul(grad_out, weights, False), *grad_weights


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    front, back = x.chunk(2, dim=-1)
    return _cast(x * cos + torch.cat((-back, front), dim=-1) * sin, x.dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in `dtype`, without a cast that does nothing.

    Compiled code of torch 2.11 silently loses the gradient of an autograd function's output that comes from one.
    """
    return x if x.dtype == dtype else x.to(dtype)


# The operators below are opaque to torch's compiler: each is one matmul, or one of our kernels.


@torch.library.custom_op("trimaran::joint_matmul", mutates_args=())
def _joint_matmul(x: Tensor, weights: Sequence[Tensor], transposed: bool) -> Tensor:
    """Return the matmul of `x` and the consecutive weights; `transposed` as in a linear layer."""
    joint = weights[0].as_strided((sum(map(len, weights)), weights[0].shape[1]), weights[0].stride())
    return x @ (joint.t() if transposed else joint)


@_joint_matmul.register_fake
def _(x: Tensor, weights: Sequence[Tensor], transposed: bool) -> Tensor:
    return x.new_empty(len(x), sum(len(each) for each in weights) if transposed else weights[0].shape[1])


@torch.library.custom_op("trimaran::gated_backward", mutates_args=())
def _gated_backward(packed: Tensor, grad_inner: Tensor) -> tuple[Tensor, Tensor]:
    if packed.is_cuda:
        from trimaran.nets.kernels.swiglu import gated_backward  # noqa: PLC0415 - only a GPU's torch has Triton

        return gated_backward(packed, grad_inner)
    gate, up = packed.float().chunk(2, dim=-1)
    sigmoid, gradient = gate.sigmoid(), grad_inner.float()
    silu = gate * sigmoid
    grad_packed = torch.cat([gradient * up * (sigmoid + silu * (1 - sigmoid)), gradient * silu], dim=-1)
    return grad_packed.to(packed.dtype), (silu * up).to(packed.dtype)


@_gated_backward.register_fake
def _(packed: Tensor, grad_inner: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(packed), torch.empty_like(grad_inner)


@torch.library.custom_op("trimaran::rotary_backward", mutates_args=())
def _rotary_backward(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if query.is_cuda:
        from trimaran.nets.kernels.rotary import rotary_backward  # noqa: PLC0415

        return rotary_backward(query, key, value, cos, sin)
    parts = [*(_rotate_backward(each, cos, sin) for each in (query, key)), value]
    return torch.cat(parts, dim=1).transpose(1, 2).flatten(2).contiguous()


@_rotary_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, heads, length, width = query.shape
    return query.new_empty(batch, length, (heads + 2 * key.shape[1]) * width)


@torch.library.custom_op("trimaran::norm_backward", mutates_args=())
def _norm_backward(
    x: Tensor, weight: Tensor, grad_residual: Tensor, grad_normed: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from trimaran.nets.kernels.rms_norm import norm_backward  # noqa: PLC0415

        return norm_backward(x, weight, grad_residual, grad_normed, eps)
    value, gradient, scale = x.float(), grad_normed.float(), weight.to(x.dtype).float()
    inverse_rms = (value.square().mean(-1, keepdim=True) + eps).rsqrt()
    value, scaled = value * inverse_rms, gradient * scale
    grad_x = grad_residual.float() + (scaled - value * (value * scaled).mean(-1, keepdim=True)) * inverse_rms
    return grad_x.to(x.dtype), (gradient * value).sum(0).to(weight.dtype)


@_norm_backward.register_fake
def _(x: Tensor, weight: Tensor, grad_residual: Tensor, grad_normed: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _rotate_backward(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    front, back = (gradient.float() * sin).chunk(2, dim=-1)
    return (gradient.float() * cos + torch.cat((back, -front), dim=-1)).to(gradient.dtype)
