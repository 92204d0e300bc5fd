"""RMSNorm, and its backward with the residual connection around it, each in one pass over memory."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

# A program sums the gradient of the weight over its rows; a second kernel adds these sums, in a fixed order.
PROGRAMS_PER_MULTIPROCESSOR, ROWS, STAGES = 4, 1, 3
VALUES_PER_THREAD = 8
MAX_STAGED_ROW_BYTES = 16384  # shared memory holds three tensors and `STAGES` of such rows
SUM_COLUMNS, SUM_ROWS = 32, 256


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of `x` [rows, width], computed in fp32 with the weight rounded to the dtype of `x`."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(width)
    with torch.cuda.device(x.device):
        _norm_forward[(triton.cdiv(rows, ROWS),)](
            x, weight, out, rows, width, eps, PADDED=padded, ROWS=ROWS, num_warps=_warps(ROWS * padded)
        )
    return out


def norm_backward(
    x: Tensor, weight: Tensor, grad_residual: Tensor | None, grad_normed: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` [rows, width] and of the weight, given those of the residual and of the norm."""
    x = x.contiguous()
    residual = x if grad_residual is None else grad_residual.contiguous()
    rows, width = x.shape
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = min(triton.cdiv(rows, ROWS), PROGRAMS_PER_MULTIPROCESSOR * multiprocessors)
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    weight_sums = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(width)
    stages = STAGES if padded * x.element_size() <= MAX_STAGED_ROW_BYTES else 1
    with torch.cuda.device(x.device):
        _norm_backward[(programs,)](
            x, weight, residual, grad_normed.contiguous(), grad_x, weight_sums, rows, width, eps,
            PADDED=padded, ROWS=ROWS, STAGES=stages, HAS_RESIDUAL=grad_residual is not None,
            num_warps=_warps(ROWS * padded),
        )  # fmt: skip
        _sum_rows[(triton.cdiv(width, SUM_COLUMNS),)](
            weight_sums, grad_weight, programs, width, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=8
        )
    return grad_x, grad_weight


def _warps(values: int) -> int:
    return max(1, min(16, values // (32 * VALUES_PER_THREAD)))


@triton.jit
def _norm_forward(x, weight, out, rows, width, eps, PADDED: tl.constexpr, ROWS: tl.constexpr):  # noqa: N803
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    mask = (column < width) & (row < rows)
    dtype = x.dtype.element_ty
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(dtype).to(tl.float32)
    offset = row.to(tl.int64) * width + column
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / width + eps)
    tl.store(out + offset, (value * inverse_rms * scale).to(dtype), mask=mask)


@triton.jit
def _norm_backward(
    x, weight, grad_residual, grad_normed, grad_x, weight_sums, rows, width, eps,
    PADDED: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, HAS_RESIDUAL: tl.constexpr,  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, PADDED)[None, :]
    in_row = column < width
    dtype = x.dtype.element_ty
    scale = tl.load(weight + column, mask=in_row, other=0.0).to(dtype).to(tl.float32)
    weight_sum = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = in_row & (row < rows)
        offset = row.to(tl.int64) * width + column
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(grad_normed + offset, mask=mask, other=0.0).to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / width + eps)
        value = value * inverse_rms
        scaled = gradient * scale
        mean = tl.sum(value * scaled, axis=1, keep_dims=True) / width
        total = (scaled - value * mean) * inverse_rms
        if HAS_RESIDUAL:
            total += tl.load(grad_residual + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + offset, total.to(dtype), mask=mask)
        weight_sum += gradient * value
    out = weight_sums + program * width + tl.arange(0, PADDED)
    tl.store(out, tl.sum(weight_sum, axis=0), mask=tl.arange(0, PADDED) < width)


@triton.jit
def _sum_rows(source, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(source + row * width + column, mask=(row < rows) & (column < width), other=0.0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + column, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=column < width)
