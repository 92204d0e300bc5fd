"""The way back through a gated feed-forward whose two halves lie in one tensor, in one pass over memory."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

BLOCK = 2048


def gated_backward(packed: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `packed` [rows, gate | up], and silu(gate) * up, of which `gradient` [rows, width] is."""
    rows, width = gradient.shape
    back, inner = torch.empty_like(packed), torch.empty_like(gradient)
    _gated_backward[(rows, triton.cdiv(width, BLOCK))](packed, gradient, back, inner, width, BLOCK=BLOCK, num_warps=8)
    return back, inner


@triton.jit
def _gated_backward(packed, gradient, back, inner, width, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = place < width
    at = row * width + place
    of_gate = row * 2 * width + place
    gate = tl.load(packed + of_gate, mask=here).to(tl.float32)
    up = tl.load(packed + of_gate + width, mask=here).to(tl.float32)
    wanted = tl.load(gradient + at, mask=here).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    kind = packed.dtype.element_ty
    tl.store(inner + at, (silu * up).to(kind), mask=here)
    tl.store(back + of_gate, (wanted * up * (share + silu * (1 - share))).to(kind), mask=here)
    tl.store(back + of_gate + width, (wanted * silu).to(kind), mask=here)
