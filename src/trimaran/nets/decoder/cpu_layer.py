"""A decoder layer in fp32 on a CPU, as two autograd functions: what comes before its attention, and what comes after.

In a small layer the bookkeeping of autograd takes as long as all that is between the matmuls. The weights of
projections of the same input are joined (`join_weights`). What is computed is the same as in separate modules, up to
rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.nets.decoder import cpu_kernels
from trimaran.nets.decoder.joint_projections import Rotation, joined


def normed_heads(
    x: Tensor, norm: nn.RMSNorm, parts: Sequence[nn.Linear], rotation: Rotation, heads: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `x`, and of its norm queries and keys with RoPE and values, [B, heads, T, head_dim], by joined `parts`."""
    biases: list[Tensor] = [each.bias for each in parts if each.bias is not None]
    bias = torch.cat(biases) if biases else None
    return _NormedHeads.apply(x, norm.weight, norm.eps, bias, *rotation, heads, *(each.weight for each in parts))


class _NormedHeads(torch.autograd.Function):
    """A norm and one matmul for queries, keys and values, with RoPE applied in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, eps: float, bias: Tensor | None, cos: Tensor, sin: Tensor,
        heads: tuple[int, int], *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        normed, inverse_rms = cpu_kernels.norm_forward(x, scale, eps)
        packed = F.linear(normed, joined(weights), bias)
        cpu_kernels.rotate_in_place(packed, cos, sin, heads=sum(heads))
        ctx.save_for_backward(x, scale, inverse_rms, normed, cos, sin, *weights)
        ctx.has_bias = bias is not None
        of_heads = packed.view(*packed.shape[:2], -1, cos.shape[-1]).transpose(1, 2)
        return x.view_as(x), *torch.split_with_sizes(of_heads, [heads[0], heads[1], heads[1]], 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, scale, inverse_rms, normed, cos, sin, *weights = ctx.saved_tensors
        grad_residual, query, key, value = gradients
        grad_packed = cpu_kernels.rotary_backward(query, key, value, cos, sin).flatten(0, 1)
        grad_joint = grad_packed.t() @ normed.view(-1, normed.shape[-1])
        grad_normed = (grad_packed @ joined(weights)).view_as(x)
        grad_x, grad_scale = cpu_kernels.norm_backward(x, scale, inverse_rms, grad_residual, grad_normed)
        grad_bias = grad_packed.sum(0) if ctx.has_bias else None
        grad_weights = torch.split_with_sizes(grad_joint, [each.shape[0] for each in weights])
        return grad_x, grad_scale, None, grad_bias, None, None, None, *grad_weights


class AttendedFeedForward(torch.autograd.Function):
    """The last projection of attention, a norm and a SwiGLU feed-forward, with both residual connections.

    `x` is the stream before the layer, `attended` the output of its attention, [B, T, hidden].
    """

    @staticmethod
    def forward(
        ctx: Any, attended: Tensor, x: Tensor, out: Tensor, scale: Tensor, eps: float,
        gate: Tensor, up: Tensor, down: Tensor,
    ) -> Tensor:  # fmt: skip
        attended = attended.flatten(0, 1)
        stream = F.linear(attended, out).add_(x.flatten(0, 1))
        normed, inverse_rms = cpu_kernels.norm_forward(stream, scale, eps)
        packed = F.linear(normed, joined([gate, up]))
        inner, sigmoid = cpu_kernels.gated_forward(packed)
        ctx.save_for_backward(attended, out, stream, scale, inverse_rms, normed, gate, up, down, packed, inner, sigmoid)
        ctx.shape = x.shape
        return F.linear(inner, down).add_(stream).view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        attended, out, stream, scale, inverse_rms, normed, gate, up, down, packed, inner, sigmoid = ctx.saved_tensors
        gradient = gradients[0].flatten(0, 1)
        grad_packed = cpu_kernels.gated_backward(packed, sigmoid, gradient @ down)
        grad_joint = grad_packed.t() @ normed
        grad_normed = grad_packed @ joined([gate, up])
        grad_stream, grad_scale = cpu_kernels.norm_backward(stream, scale, inverse_rms, gradient, grad_normed)
        grad_gate, grad_up = torch.split_with_sizes(grad_joint, [gate.shape[0], up.shape[0]])
        grad_attended = (grad_stream @ out).view(*ctx.shape[:2], -1)
        of_attention = grad_attended, grad_stream.view(ctx.shape), grad_stream.t() @ attended
        return *of_attention, grad_scale, None, grad_gate, grad_up, gradient.t() @ inner
