"""Casts to fp8 with a scale for each block of 128 values, each in one pass over memory, also to a transposed matrix.

Results are those of `parallel/fp8_blocks.py` on a CPU, bit for bit. A NaN becomes a NaN of fp8.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

TILE = 128
NUM_WARPS = 8


def row_blocks(x: Tensor, values: Tensor, scales: Tensor, turned_values: Tensor, turned_scales: Tensor) -> None:
    """Write `x` [rows, width] in fp8 and its scales, and the same of its transpose; neither to an empty tensor.

    A scale is that of 128 columns of a row. The scales are transposed, as cuBLAS reads them: [width / 128, rows] of
    `x`, and [rows / 128, width] of its transpose. Both sizes are multiples of 128.
    """
    x = x.contiguous()
    rows, width = x.shape
    with torch.cuda.device_of(x):
        _row_blocks[(width // TILE, rows // TILE)](
            x, values, scales, turned_values, turned_scales, rows, width,
            PLAIN=values.numel() > 0, TURNED=turned_values.numel() > 0, TILE=TILE, num_warps=NUM_WARPS,
        )  # fmt: skip


def square_blocks(x: Tensor, values: Tensor, scales: Tensor, *, turned: bool) -> None:
    """Write `x` [rows, width], or its transpose, in fp8 and the scale of each 128x128 block of that."""
    x = x.contiguous()
    rows, width = x.shape
    with torch.cuda.device_of(x):
        _square_blocks[(width // TILE, rows // TILE)](
            x, values, scales, rows, width, TURNED=turned, TILE=TILE, num_warps=NUM_WARPS
        )


@triton.jit
def _scales(largest):
    """Return the scales of blocks, divided by which their largest values are 448. The least is above zero."""
    return tl.div_rn(tl.maximum(largest, 1e-30), 448.0)


@triton.jit
def _row_blocks(
    x, values, scales, turned_values, turned_scales, rows, width,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, TILE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row = tl.program_id(1) * TILE + tl.arange(0, TILE).to(tl.int64)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE).to(tl.int64)
    offset = row[:, None] * width + column[None, :]
    tile = tl.load(x + offset).to(tl.float32)
    if PLAIN:
        scale = _scales(tl.max(tl.abs(tile), axis=1))
        tl.store(values + offset, tl.div_rn(tile, tl.broadcast_to(scale[:, None], (TILE, TILE))).to(tl.float8e4nv))
        tl.store(scales + tl.program_id(0).to(tl.int64) * rows + row, scale)
    if TURNED:
        scale = _scales(tl.max(tl.abs(tile), axis=0))
        cast = tl.div_rn(tile, tl.broadcast_to(scale[None, :], (TILE, TILE))).to(tl.float8e4nv)
        tl.store(turned_values + column[:, None] * rows + row[None, :], tl.trans(cast))
        tl.store(turned_scales + tl.program_id(1).to(tl.int64) * width + column, scale)


@triton.jit
def _square_blocks(
    x, values, scales, rows, width, TURNED: tl.constexpr, TILE: tl.constexpr  # noqa: N803
):  # fmt: skip
    tall, wide = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    row, column = tall * TILE + tl.arange(0, TILE), wide * TILE + tl.arange(0, TILE)
    offset = row[:, None] * width + column[None, :]
    tile = tl.load(x + offset).to(tl.float32)
    scale = _scales(tl.max(tl.max(tl.abs(tile), axis=1), axis=0))
    cast = tl.div_rn(tile, tl.broadcast_to(scale, (TILE, TILE))).to(tl.float8e4nv)
    if TURNED:
        tl.store(values + column[:, None] * rows + row[None, :], tl.trans(cast))
        tl.store(scales + wide * (rows // TILE) + tall, scale)
    else:
        tl.store(values + offset, cast)
        tl.store(scales + tall * (width // TILE) + wide, scale)
