"""Splits an fp32 tensor into two 16-bit halves: a bf16 that matmuls use, and the bits that it lacks."""

import torch
from torch import Tensor

HALF_BF16_STEP = 0x8000  # half the distance between two bf16 values, in bits of fp32


def split_fp32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper half of fp32 `values` as bf16, and the lower half as int16. `join_fp32` restores every bit.

    The upper half is the nearest bf16; of two equally near ones, the larger in magnitude. (A cast takes the even one;
    there is no other difference.) Values beyond the largest bf16 by half a step or more have an infinite upper half, as
    with a cast. All bits come back, also those of Inf and NaN; only the upper half of a NaN may not be NaN.
    """
    bits = values.view(torch.int32)
    upper = ((bits + HALF_BF16_STEP) >> 16).to(torch.int16)
    return upper.view(torch.bfloat16), (bits & 0xFFFF).to(torch.int16)


def join_fp32(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the fp32 values that `split_fp32` split.

    A lower half with its sign bit set is half a step or more: then the upper half was rounded away from zero.
    """
    # A little-endian fp32 is the two 16-bit words side by side, so no wider temporary is needed.
    words = torch.stack([lower, upper.view(torch.int16) + (lower >> 15)], dim=-1)
    return words.view(torch.float32).squeeze(-1)
