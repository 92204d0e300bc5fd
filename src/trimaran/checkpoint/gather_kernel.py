"""Gathers parts of many tensors into one buffer on a GPU, and joins 16-bit halves to fp32 values, in one launch."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

from trimaran.checkpoint.batched_copy import VALUES_PER_ROW

BLOCK_VALUES, NUM_WARPS = 2048, 8


def gather_values(rows: Tensor, into: Tensor) -> None:
    """Fill `into`, of int32, with the values that `rows` name; see `batched_copy.gather_rows`. Nothing waits."""
    _gather[(len(rows),)](rows, into, VALUES=VALUES_PER_ROW, BLOCK=BLOCK_VALUES, num_warps=NUM_WARPS)


@triton.jit
def _gather(
    rows,
    into,
    VALUES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = rows + 4 * tl.program_id(0)
    first = tl.load(row)
    second = tl.load(row + 1)
    into += tl.load(row + 2)
    count = tl.load(row + 3)
    if second == 0:
        values = first.to(tl.pointer_type(tl.int32))
        for begin in range(0, VALUES, BLOCK):
            index = begin + tl.arange(0, BLOCK)
            tl.store(into + index, tl.load(values + index, mask=index < count, other=0), mask=index < count)
    else:
        upper = first.to(tl.pointer_type(tl.int16))
        lower = second.to(tl.pointer_type(tl.int16))
        for begin in range(0, VALUES, BLOCK):
            index = begin + tl.arange(0, BLOCK)
            low = tl.load(lower + index, mask=index < count, other=0).to(tl.int32)
            high = tl.load(upper + index, mask=index < count, other=0).to(tl.int32)
            # As `optim.split_bf16.join_fp32`: with the sign bit of `low` set, the upper half was rounded up.
            tl.store(into + index, ((high + (low >> 15)) << 16) | (low & 0xFFFF), mask=index < count)
