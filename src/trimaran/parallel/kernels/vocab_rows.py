"""Triton kernels: the sums that the cross-entropy of a part of the vocabulary needs, and its gradient.

Each reads the logits once, as they are. In torch's operators these steps read and write them ten times, in fp32.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

BLOCK, WARPS = 8192, 16  # logits that one program loads at a time


def row_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each row of `logits` [N, V] the maximum, the sum of exp(logit - maximum), and the label's logit.

    The last is 0 where the label is no column of this part of the vocabulary. All are fp32 [N].
    """
    rows, columns = logits.shape
    highest = torch.full((rows,), -float("inf"), device=logits.device)
    totals, chosen = torch.zeros(2, rows, device=logits.device)
    if rows and columns:  # the last ranks may have no column
        block = min(BLOCK, triton.next_power_of_2(columns))
        with torch.cuda.device(logits.device):
            _row_sums[(rows,)](logits, labels, highest, totals, chosen, logits.stride(0), columns, BLOCK=block,
                               num_warps=_warps(block))  # fmt: skip
    return highest, totals, chosen


def row_gradients(logits: Tensor, labels: Tensor, log_sums: Tensor, factors: Tensor) -> Tensor:
    """Return the gradient of each row's cross-entropy times its factor; `log_sums` are over the whole vocabulary."""
    rows, columns = logits.shape
    gradient = torch.empty(rows, columns, device=logits.device, dtype=logits.dtype)
    if rows and columns:
        block = min(BLOCK, triton.next_power_of_2(columns))
        grid = (rows, triton.cdiv(columns, block))
        with torch.cuda.device(logits.device):
            _row_gradients[grid](logits, labels, log_sums, factors, gradient, logits.stride(0), columns, BLOCK=block,
                                 num_warps=_warps(block))  # fmt: skip
    return gradient


def _warps(block: int) -> int:
    return max(1, min(WARPS, block // 256))


@triton.jit
def _row_sums(logits, labels, highest, totals, chosen, stride, columns, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)  # the offset of a row may exceed 2^31 logits
    at = logits + row * stride
    label = tl.load(labels + row)
    is_here = (label >= 0) & (label < columns)
    tl.store(chosen + row, tl.load(at + label, mask=is_here, other=0.0).to(tl.float32))
    top = -float("inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(at + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        finite = tl.where(higher == -float("inf"), 0.0, higher)  # a row of masked logits has no NaN
        total = total * tl.exp(top - finite) + tl.sum(tl.exp(x - finite), axis=0)
        top = higher
    tl.store(highest + row, top)
    tl.store(totals + row, total)


@triton.jit
def _row_gradients(logits, labels, log_sums, factors, gradient, stride, columns, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    value = tl.exp(x - tl.load(log_sums + row)) - tl.where(column == tl.load(labels + row), 1.0, 0.0)
    value = value * tl.load(factors + row)
    tl.store(gradient + row * columns + column, value.to(gradient.dtype.element_ty), mask=inside)
