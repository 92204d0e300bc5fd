"""Triton kernel: a large tensor times a scalar tensor, at full memory bandwidth.

torch multiplies a bf16 tensor by an fp32 scalar tensor at a fifth of that bandwidth.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

BLOCK, WARPS = 4096, 8


def scale_to_dtype(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` times the one-element tensor `factor`, in `dtype`; in place if the tensor already has it."""
    assert tensor.is_contiguous(), "the kernel reads the tensor as one flat array"
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
