"""Triton kernels that cast to fp8 and transpose in one pass. Imported only on a GPU, where Triton exists.

A compiled block writes a transposed tensor element by element, at a fraction of the memory bandwidth. These kernels
transpose a tile before they write it.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor
from torch.library import triton_op, wrap_triton

# A row of 64 fp8 values is two 32-byte memory sectors.
TILE, WARPS = 64, 4


@triton_op("trimaran::cast_both", mutates_args={})
def cast_both(x: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `x` [N, M] times `factor` in fp8, and its transpose, both contiguous."""
    rows, columns = x.shape
    plain = torch.empty((rows, columns), device=x.device, dtype=dtype)
    other = torch.empty((columns, rows), device=x.device, dtype=dtype)
    wrap_triton(_cast)[triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)](
        x.contiguous(), factor, plain, other, rows, columns, TILE=TILE, BOTH=True, SCALED=True, num_warps=WARPS
    )
    return plain, other


@triton_op("trimaran::cast_transposed", mutates_args={})
def cast_transposed(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the transpose of `x` [N, M] times `factor` in fp8, contiguous."""
    rows, columns = x.shape
    other = torch.empty((columns, rows), device=x.device, dtype=dtype)
    wrap_triton(_cast)[triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)](
        x.contiguous(), factor, other, other, rows, columns, TILE=TILE, BOTH=False, SCALED=True, num_warps=WARPS
    )
    return other


@triton_op("trimaran::transposed", mutates_args={})
def transposed(x: Tensor) -> Tensor:
    """Return the transpose of `x` [N, M], which is already fp8, contiguous."""
    rows, columns = x.shape
    other = torch.empty((columns, rows), device=x.device, dtype=x.dtype)
    x = x.contiguous()
    wrap_triton(_cast)[triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)](
        x, x, other, other, rows, columns, TILE=TILE, BOTH=False, SCALED=False, num_warps=WARPS
    )
    return other


@triton.jit
def _cast(x, factor, plain, other, rows, columns, TILE: tl.constexpr, BOTH: tl.constexpr, SCALED: tl.constexpr):  # noqa: N803, PLR0913
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    tile = tl.load(x + at, mask=inside)
    if SCALED:
        tile = (tile.to(tl.float32) * tl.load(factor)).to(other.dtype.element_ty)
    if BOTH:
        tl.store(plain + at, tile, mask=inside)
    tl.store(other + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))
