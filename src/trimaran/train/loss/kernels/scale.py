"""A large tensor times a number that is on the GPU, at the speed of its memory.

torch's own product of a bf16 tensor and an fp32 scalar tensor runs at a fifth of that.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

BLOCK, WARPS = 4096, 8


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` times `factor`, which has one element, in `dtype`; where that is the tensor's own, in place."""
    assert tensor.is_contiguous(), "only what lies in memory as one piece is read as one"
    out = tensor if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype)
    if count := tensor.numel():
        with torch.cuda.device(tensor.device):
            _scale[(triton.cdiv(count, BLOCK),)](tensor, out, factor, count, BLOCK=BLOCK, num_warps=WARPS)
    return out


@triton.jit
def _scale(source, out, factor, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(source + at, mask=inside).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)
