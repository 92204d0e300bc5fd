"""Projections of the same input as one product: their weights lie one behind the other in memory.

Parameters and their names stay what they are. Each is a slice of one tensor, so nothing is copied to join them, and
whoever changes a parameter in place changes the joint. torch's compiler would write the gradients of the parts into one
tensor at half the memory's speed; on a GPU kernels of our own do that.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]


def joint_slices(parts: Sequence[nn.Linear], dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each layer's weight with memory for it: rows of one new tensor, one behind the other."""
    rows = [len(each.weight) for each in parts]
    whole = torch.empty(sum(rows), parts[0].in_features, dtype=dtype, device=parts[0].weight.device)
    yield from zip((each.weight for each in parts), whole.split(rows), strict=True)


def project(x: Tensor, parts: Sequence[nn.Linear]) -> Tensor:
    """Return what the layers make of `x`, side by side in the last dimension. Their weights are `joint_slices`."""
    rows = x.flatten(0, -2).to(parts[0].weight.dtype)
    out = _Joint.apply(rows, *(each.weight for each in parts)).unflatten(0, x.shape[:-1])
    biases: list[Tensor] = [each.bias for each in parts if each.bias is not None]
    return out + torch.cat(biases).to(out.dtype) if biases else out


def gated(x: Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Tensor:
    """Return a gated feed-forward of `x`, whose first two weights are `joint_slices`."""
    rows = x.flatten(0, -2).to(gate.weight.dtype)
    return _Gated.apply(rows, gate.weight, up.weight, down.weight).unflatten(0, x.shape[:-1])


def turned_heads(packed: Tensor, rotation: Rotation, heads: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, turned by their positions, and values, [B, heads, T, head_dim] each.

    They are cut from `packed` [B, T, query | key | value]; `heads` are those of the queries and those of the keys.
    """
    return _Turned.apply(packed, *rotation, *heads)


def normed(x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """Return `x` [..., hidden] as it is, for what goes past the norm, and what comes out of the norm."""
    assert norm.weight is not None
    assert norm.eps is not None
    return _Normed.apply(x, norm.weight, norm.eps)


class _Normed(torch.autograd.Function):
    """A norm and the stream past it. Their gradients meet where each is at hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x.view_as(x), _cast(F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps), x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        past, through = (each.contiguous().flatten(0, -2) for each in gradients)
        back, of_weight = torch.ops.trimaran.norm_backward(x.flatten(0, -2), weight, past, through, ctx.eps)
        return back.view_as(x), of_weight, None


class _Joint(torch.autograd.Function):
    """One product for several layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return torch.ops.trimaran.joint_product(x, weights, True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        return _back(x, weights, gradients[0].contiguous())


class _Gated(torch.autograd.Function):
    """Two products. What is between them is computed again in backward, where it has to be read anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        packed = torch.ops.trimaran.joint_product(x, [gate, up], True)
        ctx.save_for_backward(x, gate, up, down, packed)
        first, second = packed.chunk(2, dim=-1)
        return (F.silu(first) * second) @ down.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, ...]:
        x, gate, up, down, packed = ctx.saved_tensors
        out = gradients[0].contiguous()
        packed_gradient, inner = torch.ops.trimaran.gated_backward(packed, out @ down)
        return *_back(x, [gate, up], packed_gradient), out.t() @ inner


class _Turned(torch.autograd.Function):
    """Cut into heads and turned."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        width = packed.shape[-1] // (heads + 2 * kv_heads)
        cut = packed.unflatten(-1, (-1, width)).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
        query, key = (_turn(each, cos, sin) for each in cut[:2])
        return query, key, cut[2].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return torch.ops.trimaran.rotary_backward(*gradients, cos, sin), None, None, None, None


def _back(x: Tensor, weights: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of input and weights of a joint product."""
    of_weights = (gradient.t() @ x).split([len(each) for each in weights])
    return torch.ops.trimaran.joint_product(gradient, weights, False), *of_weights


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    front, back = x.chunk(2, dim=-1)
    return _cast(x * cos + torch.cat((-back, front), dim=-1) * sin, x.dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in `dtype`, and never through a cast that does nothing.

    Compiled code of torch 2.11 loses, without a word, the gradient of what an autograd function returns from one.
    """
    return x if x.dtype == dtype else x.to(dtype)


# The operators below are opaque to torch's compiler: what is inside is one product, or one kernel of ours.


@torch.library.custom_op("trimaran::joint_product", mutates_args=())
def _joint_product(x: Tensor, weights: Sequence[Tensor], turned: bool) -> Tensor:
    """Return `x` times the weights, which lie one behind the other; `turned`: times their transpose, as in a layer."""
    whole = weights[0].as_strided((sum(map(len, weights)), weights[0].shape[1]), weights[0].stride())
    return x @ (whole.t() if turned else whole)


@_joint_product.register_fake
def _(x: Tensor, weights: Sequence[Tensor], turned: bool) -> Tensor:
    return x.new_empty(len(x), sum(len(each) for each in weights) if turned else weights[0].shape[1])


@torch.library.custom_op("trimaran::gated_backward", mutates_args=())
def _gated_backward(packed: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    if packed.is_cuda:
        from trimaran.nets.kernels.swiglu import gated_backward  # noqa: PLC0415 - only a GPU's torch has Triton

        return gated_backward(packed, gradient)
    gate, up = packed.float().chunk(2, dim=-1)
    share, wanted = gate.sigmoid(), gradient.float()
    silu = gate * share
    back = torch.cat([wanted * up * (share + silu * (1 - share)), wanted * silu], dim=-1)
    return back.to(packed.dtype), (silu * up).to(packed.dtype)


@_gated_backward.register_fake
def _(packed: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(packed), torch.empty_like(gradient)


@torch.library.custom_op("trimaran::rotary_backward", mutates_args=())
def _rotary_backward(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if query.is_cuda:
        from trimaran.nets.kernels.rotary import rotary_backward  # noqa: PLC0415

        return rotary_backward(query, key, value, cos, sin)
    parts = [*(_turn_back(each, cos, sin) for each in (query, key)), value]
    return torch.cat(parts, dim=1).transpose(1, 2).flatten(2).contiguous()


@_rotary_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, heads, length, width = query.shape
    return query.new_empty(batch, length, (heads + 2 * key.shape[1]) * width)


@torch.library.custom_op("trimaran::norm_backward", mutates_args=())
def _norm_backward(x: Tensor, weight: Tensor, past: Tensor, through: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from trimaran.nets.kernels.rms_norm import norm_backward  # noqa: PLC0415

        return norm_backward(x, weight, past, through, eps)
    value, wanted, scale = x.float(), through.float(), weight.to(x.dtype).float()
    root = (value.square().mean(-1, keepdim=True) + eps).rsqrt()
    value, scaled = value * root, wanted * scale
    back = past.float() + (scaled - value * (value * scaled).mean(-1, keepdim=True)) * root
    return back.to(x.dtype), (wanted * value).sum(0).to(weight.dtype)


@_norm_backward.register_fake
def _(x: Tensor, weight: Tensor, past: Tensor, through: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _turn_back(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    front, back = (gradient.float() * sin).chunk(2, dim=-1)
    return (gradient.float() * cos + torch.cat((back, -front), dim=-1)).to(gradient.dtype)
