"""An fp32 weight as two halves of sixteen bits: a bf16 that products take, and what it lacks."""

import torch
from torch import Tensor

HALF_A_STEP = 0x8000  # of bf16, in bits of fp32


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper half of fp32 `values`, bf16, and the lower, int16. `join` makes the same bits of them again.

    The upper half is the nearest bf16; of two that are equally near, the larger in magnitude. (A cast takes the even
    one: nothing else is different.) What is beyond the largest bf16 by half a step or more has infinity as its upper
    half, as a cast has. The bits of every value come back, those of infinities and NaN too; only the upper half of a
    NaN need not be one.
    """
    bits = values.view(torch.int32)
    upper = ((bits + HALF_A_STEP) >> 16).to(torch.int16)
    return upper.view(torch.bfloat16), (bits & 0xFFFF).to(torch.int16)


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the fp32 values that `split` made two halves of.

    Where the lower half is half a step or more (its sign bit is set), the upper one has been rounded away from zero.
    """
    # A little-endian fp32 is the two words as they are: nothing wider is made on the way.
    words = torch.stack([lower, upper.view(torch.int16) + (lower >> 15)], dim=-1)
    return words.view(torch.float32).squeeze(-1)
