"""Backward of RMSNorm and the residual connection around it, in one pass over memory."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

PROGRAMS_PER_MULTIPROCESSOR = 8  # each sums the gradient of the weight over its rows


def norm_backward(
    x: Tensor, weight: Tensor, grad_residual: Tensor, grad_normed: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` [rows, width] and of the weight, given those of the residual and of the norm."""
    rows, width = x.shape
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = min(rows, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors)
    grad_x = torch.empty_like(x)
    weight_sums = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(width)
    warps = max(1, min(16, padded // 512))
    _norm_backward[(programs,)](
        x, weight, grad_residual, grad_normed, grad_x, weight_sums, rows, width, eps, PADDED=padded, num_warps=warps
    )  # fmt: skip
    return grad_x, weight_sums.sum(0).to(weight.dtype)


@triton.jit
def _norm_backward(  # noqa: PLR0913
    x, weight, grad_residual, grad_normed, grad_x, weight_sums, rows, width, eps, PADDED: tl.constexpr  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, PADDED)
    mask = column < width
    dtype = x.dtype.element_ty
    scale = tl.load(weight + column, mask=mask, other=0.0).to(dtype).to(tl.float32)
    weight_sum = tl.zeros([PADDED], dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * width + column
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(grad_normed + offset, mask=mask, other=0.0).to(tl.float32)
        residual = tl.load(grad_residual + offset, mask=mask, other=0.0).to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
        value = value * inverse_rms
        scaled = gradient * scale
        mean = tl.sum(value * scaled, axis=0) / width
        tl.store(grad_x + offset, (residual + (scaled - value * mean) * inverse_rms).to(dtype), mask=mask)
        weight_sum += gradient * value
    tl.store(weight_sums + program * width + column, weight_sum, mask=mask)
