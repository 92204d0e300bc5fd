"""The way back through a norm and past it, in one pass over memory."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

PROGRAMS = 8  # on each multiprocessor; each sums the gradient of the weight over its rows


def norm_backward(x: Tensor, weight: Tensor, past: Tensor, through: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` [rows, width] and of the weight: `past` came past the norm, `through` through it."""
    rows, width = x.shape
    programs = min(rows, PROGRAMS * torch.cuda.get_device_properties(x.device).multi_processor_count)
    back = torch.empty_like(x)
    sums = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(width)
    warps = max(1, min(16, padded // 512))
    _norm_backward[(programs,)](
        x, weight, past, through, back, sums, rows, width, eps, PADDED=padded, num_warps=warps
    )  # fmt: skip
    return back, sums.sum(0).to(weight.dtype)


@triton.jit
def _norm_backward(  # noqa: PLR0913
    x, weight, past, through, back, sums, rows, width, eps, PADDED: tl.constexpr  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0)
    place = tl.arange(0, PADDED)
    here = place < width
    kind = x.dtype.element_ty
    scale = tl.load(weight + place, mask=here, other=0.0).to(kind).to(tl.float32)
    total = tl.zeros([PADDED], dtype=tl.float32)
    for number in range(program, rows, tl.num_programs(0)):
        at = tl.cast(number, tl.int64) * width + place
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        wanted = tl.load(through + at, mask=here, other=0.0).to(tl.float32)
        beside = tl.load(past + at, mask=here, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
        value = value * root
        scaled = wanted * scale
        along = tl.sum(value * scaled, axis=0) / width
        tl.store(back + at, (beside + (scaled - value * along) * root).to(kind), mask=here)
        total += wanted * value
    tl.store(sums + program * width + place, total, mask=here)
