"""SwiGLU, whose two inputs are halves of one tensor, and its backward, each in one pass over memory."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

BLOCK = 2048


def gated_backward(packed: Tensor, grad_inner: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `packed` [rows, gate | up], and silu(gate) * up, given its gradient [rows, width]."""
    rows, width = grad_inner.shape
    grad_packed, inner = torch.empty_like(packed), torch.empty_like(grad_inner)
    _gated_backward[(rows, triton.cdiv(width, BLOCK))](
        packed, grad_inner, grad_packed, inner, width, BLOCK=BLOCK, num_warps=8
    )
    return grad_packed, inner


@triton.jit
def _gated_backward(packed, grad_inner, grad_packed, inner, width, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    offset = row * width + column
    gate_offset = row * 2 * width + column
    gate = tl.load(packed + gate_offset, mask=mask).to(tl.float32)
    up = tl.load(packed + gate_offset + width, mask=mask).to(tl.float32)
    gradient = tl.load(grad_inner + offset, mask=mask).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dtype = packed.dtype.element_ty
    tl.store(inner + offset, (silu * up).to(dtype), mask=mask)
    tl.store(grad_packed + gate_offset, (gradient * up * (sigmoid + silu * (1 - sigmoid))).to(dtype), mask=mask)
    tl.store(grad_packed + gate_offset + width, (gradient * silu).to(dtype), mask=mask)


def gated_forward(packed: Tensor) -> Tensor:
    """Return silu(gate) * up of `packed` [rows, gate | up], computed in fp32."""
    packed = packed.contiguous()
    rows, width = len(packed), packed.shape[1] // 2
    inner = packed.new_empty(rows, width)
    with torch.cuda.device(packed.device):
        _gated_forward[(rows, triton.cdiv(width, BLOCK))](packed, inner, width, BLOCK=BLOCK, num_warps=8)
    return inner


@triton.jit
def _gated_forward(packed, inner, width, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(packed + row * 2 * width + column, mask=mask).to(tl.float32)
    up = tl.load(packed + row * 2 * width + width + column, mask=mask).to(tl.float32)
    tl.store(inner + row * width + column, (gate * tl.sigmoid(gate) * up).to(inner.dtype.element_ty), mask=mask)
