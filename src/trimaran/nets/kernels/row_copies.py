"""Copies of rows at permuted places, and sums of such copies, each in one pass over memory."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

MAX_BLOCK, VALUES_PER_THREAD = 2048, 16


def scatter_rows(x: Tensor, places: Tensor) -> Tensor:
    """Return a tensor in which row `places[n, j]` is row n of `x`, for every j; `places` [N, copies] has each once."""
    x, (count, copies), width = x.contiguous(), places.shape, x.shape[1]
    out = x.new_empty(count * copies, width)
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    with torch.cuda.device(x.device):
        _scatter[(count, triton.cdiv(width, block))](
            x, places, out, width, COPIES=copies, BLOCK=block, num_warps=_warps(block)
        )
    return out


def gather_rows(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum over j of row `places[n, j]` of `rows` times `weights[n, j]`, for every n, added up in fp32."""
    rows, (count, copies), width = rows.contiguous(), places.shape, rows.shape[1]
    out = rows.new_empty(count, width)
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    with torch.cuda.device(rows.device):
        _gather[(count, triton.cdiv(width, block))](
            rows, places, rows if weights is None else weights.contiguous(), out, width,
            COPIES=copies, BLOCK=block, WEIGHTED=weights is not None, num_warps=_warps(block),
        )  # fmt: skip
    return out


def gather_rows_backward(gradient: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `rows` and of `weights`, given that of the result of `gather_rows`."""
    gradient, rows, weights = gradient.contiguous(), rows.contiguous(), weights.contiguous()
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    block = triton.next_power_of_2(rows.shape[1])
    with torch.cuda.device(rows.device):
        _gather_backward[(len(places),)](
            gradient, rows, places, weights, grad_rows, grad_weights, rows.shape[1],
            COPIES=places.shape[1], BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return grad_rows, grad_weights


def _warps(block: int) -> int:
    return max(1, min(16, block // (32 * VALUES_PER_THREAD)))


@triton.jit
def _scatter(x, places, out, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    number = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    row = tl.load(x + number * width + column, mask=mask)
    for copy in tl.static_range(COPIES):
        place = tl.load(places + number * COPIES + copy)
        tl.store(out + place * width + column, row, mask=mask)


@triton.jit
def _gather(rows, places, weights, out, width, COPIES: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):  # noqa: N803
    number = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for copy in tl.static_range(COPIES):
        place = tl.load(places + number * COPIES + copy)
        row = tl.load(rows + place * width + column, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            row = row * tl.load(weights + number * COPIES + copy).to(tl.float32)
        total += row
    tl.store(out + number * width + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gather_backward(
    gradient, rows, places, weights, grad_rows, grad_weights, width, COPIES: tl.constexpr, BLOCK: tl.constexpr  # noqa: N803
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    given = tl.load(gradient + number * width + column, mask=mask, other=0.0).to(tl.float32)
    for copy in tl.static_range(COPIES):
        at = number * COPIES + copy
        offset = tl.load(places + at) * width + column
        row = tl.load(rows + offset, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weights + at).to(tl.float32)
        tl.store(grad_rows + offset, (given * weight).to(grad_rows.dtype.element_ty), mask=mask)
        tl.store(grad_weights + at, tl.sum(given * row, axis=0).to(grad_weights.dtype.element_ty))
