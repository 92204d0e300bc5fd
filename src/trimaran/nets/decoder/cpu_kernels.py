"""The steps between the matmuls of a decoder layer in fp32 on a CPU, forward and backward, in few passes over memory.

On a CPU a small operator costs as much as its pass over memory, and an exponential as much as ten products. So these
work in place, and save what autograd would compute again. They have no gradients of their own: the autograd functions
of `cpu_layer.py` and the operators of joint projections call them.
"""

import torch
from torch import Tensor


def is_supported(x: Tensor) -> bool:
    """Return whether these kernels compute on `x`: fp32 on a CPU, outside compiled code."""
    return x.is_cpu and x.dtype is torch.float32 and not torch.compiler.is_compiling()


def rotate_in_place(packed: Tensor, cos: Tensor, sin: Tensor, *, heads: int, backward: bool = False) -> None:
    """Apply RoPE, of `cos` and `sin` with equal halves, or its backward, to the first heads of `packed`, in place."""
    rows, length, _ = packed.shape
    half = cos.shape[-1] // 2
    cos, sin = cos.narrow(-1, 0, half).transpose(1, 2), sin.narrow(-1, 0, half).transpose(1, 2)
    rotated = packed.view(rows, length, -1, 2, half).narrow(2, 0, heads)
    front, back = rotated.select(3, 0), rotated.select(3, 1)
    sign = -1 if backward else 1
    from_front = front * sin
    front.mul_(cos).addcmul_(back, sin, value=-sign)
    back.mul_(cos).add_(from_front, alpha=sign)


def rotary_backward(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient [B, T, query | key | value] of a joint projection, given those of its rotated parts."""
    packed = torch.cat([query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)], dim=2).flatten(2)
    rotate_in_place(packed, cos, sin, heads=query.shape[1] + key.shape[1], backward=True)
    return packed


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return what RMSNorm multiplies each row of `x` [..., width] by, [..., 1]."""
    return x.square().sum(-1, keepdim=True).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of `x` [..., width], and its `inverse_rms`."""
    factors = inverse_rms(x, eps)
    return (x * factors).mul_(weight), factors


def norm_backward(
    x: Tensor, weight: Tensor, factors: Tensor, grad_residual: Tensor | None, grad_normed: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and the norm's weight, given those of residual and norm, and its `inverse_rms`."""
    value = x * factors
    product = (grad_normed * value).flatten(0, -2)
    grad_weight = product.sum(0)
    means = (product @ weight).mul_(-1 / x.shape[-1]).view_as(factors)
    grad_x = value.mul_(means).addcmul_(grad_normed, weight)
    return grad_x.mul_(factors) if grad_residual is None else grad_x.mul_(factors).add_(grad_residual), grad_weight


def gated_forward(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up of `packed` [rows, gate | up], and the sigmoid of the gate."""
    gate, up = packed.chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    return (gate * sigmoid).mul_(up), sigmoid


def gated_backward(packed: Tensor, sigmoid: Tensor, grad_inner: Tensor) -> Tensor:
    """Return the gradient of `packed`, given that of the result of `gated_forward`."""
    gate, up = packed.chunk(2, dim=-1)
    grad_packed = torch.empty_like(packed)
    grad_gate, grad_up = grad_packed.chunk(2, dim=-1)
    silu = gate * sigmoid
    torch.mul(grad_inner, silu, out=grad_up)
    slope = silu.addcmul_(silu, sigmoid, value=-1).add_(sigmoid)
    torch.mul(grad_inner, up, out=grad_gate).mul_(slope)
    return grad_packed
