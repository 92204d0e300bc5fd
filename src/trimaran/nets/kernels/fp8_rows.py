"""Rows in fp8, each with its own scale, in one pass over memory."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

VALUES_PER_THREAD = 16


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` [rows, width] in e4m3, and the fp32 scales [rows, 1] that its values were divided by."""
    x = x.contiguous()
    rows, width = x.shape
    out, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(rows, 1, device=x.device)
    block = triton.next_power_of_2(width)
    with torch.cuda.device(x.device):
        _fp8_rows[(rows,)](
            x, out, scales, width, BLOCK=block, num_warps=max(1, min(16, block // (32 * VALUES_PER_THREAD)))
        )
    return out, scales


@triton.jit
def _fp8_rows(x, out, scales, width, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    values = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-12) / 448.0  # the largest e4m3 value
    tl.store(scales + row, scale)
    tl.store(out + row * width + column, (values / scale).to(tl.float8e4nv), mask=mask)
