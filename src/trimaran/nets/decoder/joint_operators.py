"""The operators of joint projections, each one matmul or one of our kernels. torch's compiler does not look inside.

They have no gradients of their own: `nets/decoder/joint_projections.py` calls them in autograd functions.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.nets.decoder import cpu_kernels
from trimaran.nets.operators import define_operator


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` [B, heads, T, head_dim] with RoPE applied, computed in fp32, in its own dtype."""
    front, back = x.chunk(2, dim=-1)
    return cast_if_needed(x * cos + torch.cat((-back, front), dim=-1) * sin, x.dtype)


def cast_if_needed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in `dtype`, without a cast that does nothing.

    Compiled code of torch 2.11 silently loses the gradient of an autograd function's output that comes from one.
    """
    return x if x.dtype == dtype else x.to(dtype)


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Return the tensor of which the weights are consecutive slices."""
    return weights[0].as_strided((sum([each.shape[0] for each in weights]), weights[0].shape[1]), weights[0].stride())


def _joint_matmul(x: Tensor, weights: Sequence[Tensor], transposed: bool) -> Tensor:
    """Return the matmul of `x` and the consecutive weights; `transposed` as in a linear layer."""
    joint = joined(weights)
    return x @ (joint.t() if transposed else joint)


def _joint_matmul_fake(x: Tensor, weights: Sequence[Tensor], transposed: bool) -> Tensor:
    return x.new_empty(len(x), sum(len(each) for each in weights) if transposed else weights[0].shape[1])


def _rotary_projection(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, cos: Tensor, sin: Tensor, num_rotated: int
) -> Tensor:
    """Return the joint projection of `x` [B, T, hidden], with RoPE applied to its first `num_rotated` heads."""
    packed = F.linear(x, joined(weights), None if bias is None else bias.to(x.dtype))
    if packed.is_cuda:
        from trimaran.nets.kernels.rotary_projection import rotate_in_place  # noqa: PLC0415 - only a GPU has Triton

        rotate_in_place(packed, cos, sin, heads=num_rotated)
        return packed
    if cpu_kernels.is_supported(packed):
        cpu_kernels.rotate_in_place(packed, cos, sin, heads=num_rotated)
        return packed
    heads = packed.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)
    rotated = rotate(heads[:, :num_rotated], cos, sin)
    return torch.cat([rotated, heads[:, num_rotated:]], dim=1).transpose(1, 2).flatten(2).contiguous()


def _rotary_projection_fake(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, cos: Tensor, sin: Tensor, num_rotated: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(len(each) for each in weights))


def _rotary_backward(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient [B, T, query | key | value] of a joint projection, given those of its rotated parts."""
    if query.is_cuda:
        from trimaran.nets.kernels.rotary_projection import rotary_backward  # noqa: PLC0415

        return rotary_backward(query, key, value, cos, sin)
    if cpu_kernels.is_supported(query):
        return cpu_kernels.rotary_backward(query, key, value, cos, sin)
    parts = [*(_rotate_backward(each, cos, sin) for each in (query, key)), value]
    return torch.cat(parts, dim=1).transpose(1, 2).flatten(2).contiguous()


def _rotate_backward(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    front, back = (gradient.float() * sin).chunk(2, dim=-1)
    return (gradient.float() * cos + torch.cat((back, -front), dim=-1)).to(gradient.dtype)


def _rotary_backward_fake(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, heads, length, width = query.shape
    return query.new_empty(batch, length, (heads + 2 * key.shape[1]) * width)


def _gated_backward(packed: Tensor, grad_inner: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `packed` [rows, gate | up], and silu(gate) * up, given the gradient of the latter."""
    if packed.is_cuda:
        from trimaran.nets.kernels.swiglu import gated_backward  # noqa: PLC0415

        return gated_backward(packed, grad_inner)
    if cpu_kernels.is_supported(packed):
        inner, sigmoid = cpu_kernels.gated_forward(packed)
        return cpu_kernels.gated_backward(packed, sigmoid, grad_inner), inner
    gate, up = packed.float().chunk(2, dim=-1)
    sigmoid, gradient = gate.sigmoid(), grad_inner.float()
    silu = gate * sigmoid
    grad_packed = torch.cat([gradient * up * (sigmoid + silu * (1 - sigmoid)), gradient * silu], dim=-1)
    return grad_packed.to(packed.dtype), (silu * up).to(packed.dtype)


def _gated_backward_fake(packed: Tensor, grad_inner: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(packed), torch.empty_like(grad_inner)


def _norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of `x` [rows, width], computed in fp32 with the weight rounded to the dtype of `x`."""
    if x.is_cuda:
        from trimaran.nets.kernels.rms_norm import norm_forward  # noqa: PLC0415

        return norm_forward(x, weight, eps)
    return F.rms_norm(x.float(), x.shape[-1:], weight.to(x.dtype).float(), eps).to(x.dtype)


def _norm_forward_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


def _norm_backward(
    x: Tensor, weight: Tensor, grad_residual: Tensor | None, grad_normed: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` [rows, width] and of the norm's weight, given those of the residual and the norm."""
    if x.is_cuda:
        from trimaran.nets.kernels.rms_norm import norm_backward  # noqa: PLC0415

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


def _norm_backward_fake(
    x: Tensor, weight: Tensor, grad_residual: Tensor | None, grad_normed: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


define_operator(
    "joint_matmul(Tensor x, Tensor[] weights, bool transposed) -> Tensor", _joint_matmul, _joint_matmul_fake
)
define_operator(
    "rotary_projection(Tensor x, Tensor[] weights, Tensor? bias, Tensor cos, Tensor sin, SymInt num_rotated) -> Tensor",
    _rotary_projection,
    _rotary_projection_fake,
)
define_operator(
    "rotary_backward(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin) -> Tensor",
    _rotary_backward,
    _rotary_backward_fake,
)
define_operator(
    "gated_backward(Tensor packed, Tensor grad_inner) -> (Tensor, Tensor)", _gated_backward, _gated_backward_fake
)
define_operator(
    "norm_backward(Tensor x, Tensor weight, Tensor? grad_residual, Tensor grad_normed, float eps) -> (Tensor, Tensor)",
    _norm_backward,
    _norm_backward_fake,
)
define_operator("norm_forward(Tensor x, Tensor weight, float eps) -> Tensor", _norm_forward, _norm_forward_fake)
