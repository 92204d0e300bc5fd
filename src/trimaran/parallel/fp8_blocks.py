"""fp8 matmuls with a scale for each block of values: 1x128 and 128x128 (DeepSeek-V3), or 1x32 (MXFP8).

A block scale follows outliers more closely than one scale for a whole tensor, so gradients are e4m3, too.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from trimaran.core import FP8_BLOCK, MX_BLOCK
from trimaran.nets import define_operator
from trimaran.parallel.tensor_sums import has_kernels

DTYPE = torch.float8_e4m3fn
MAX_VALUE = torch.finfo(DTYPE).max  # 448
MAX_EXPONENT = 8  # of e4m3: 448 is 1.75 * 2^8
SCALE_BIAS = 127  # of e8m0
MIN_AMAX = 1e-30  # avoids a division by zero for a block of zeros
L4 = 4  # cuBLAS wants the scales of 128x128 blocks in columns of a multiple of 4


class Blocks(NamedTuple):
    """A matrix in fp8 [rows, columns], and the scale of each block of it: multiplied with it, the values."""

    values: Tensor
    scales: Tensor


def in_row_blocks(x: Tensor) -> Blocks:
    """Return the matrix in fp8 with an fp32 scale for each 128 columns of a row."""
    blocks = x.float().unflatten(-1, (-1, FP8_BLOCK))
    scales = blocks.abs().amax(-1).clamp(min=MIN_AMAX) / MAX_VALUE
    return Blocks((blocks / scales.unsqueeze(-1)).to(DTYPE).flatten(-2), scales)


def in_square_blocks(x: Tensor) -> Blocks:
    """Return the matrix in fp8 with an fp32 scale for each 128x128 block."""
    blocks = x.float().unflatten(0, (-1, FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    scales = blocks.abs().amax((1, 3)).clamp(min=MIN_AMAX) / MAX_VALUE
    return Blocks((blocks / scales[:, None, :, None]).to(DTYPE).view(x.shape), scales)


def in_mx_blocks(x: Tensor) -> Blocks:
    """Return the matrix in fp8 with a power of two for each 32 columns of a row, as e8m0 bits (OCP MX, `floor`).

    The largest value of a block lies between 2^8 and 2^9, so that values above 448 are clamped.
    """
    blocks = x.float().unflatten(-1, (-1, MX_BLOCK))
    exponents = (blocks.abs().amax(-1).view(torch.int32) >> 23) - MAX_EXPONENT
    bits = exponents.clamp(1, 254)
    scale = (bits << 23).view(torch.float32)
    scaled = blocks / scale.unsqueeze(-1)
    # `clamp` keeps a NaN, which the step guard detects; an Inf becomes one.
    scaled = torch.where(scaled.isinf(), torch.nan, scaled.clamp(-MAX_VALUE, MAX_VALUE))
    return Blocks(scaled.to(DTYPE).flatten(-2), bits.to(torch.uint8))


def dequantized(blocks: Blocks) -> Tensor:
    scales = blocks.scales
    if scales.dtype == torch.uint8:
        scales = (scales.to(torch.int32) << 23).view(torch.float32)
    tall, wide = (size // count for size, count in zip(blocks.values.shape, scales.shape, strict=True))
    return blocks.values.float() * scales.repeat_interleave(tall, 0).repeat_interleave(wide, 1)


class BlockMatmul(torch.autograd.Function):
    """The matmul of rows [N, K] and a weight [M, K] in blocks, and its two gradients.

    Every operand has its blocks along the dim that is summed over, so rows and gradients are cast twice: backward sums
    over rows. The rows are saved in fp8 as backward needs them, and the weight itself, as in `Fp8Matmul`. A weight that
    was gathered in fp8 is `values` and `scales`; `weight` then only has a dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, is_mx: bool, values: Tensor | None = None, scales: Tensor | None = None
    ) -> Tensor:
        for_rows, for_weight, *_ = ctx.needs_input_grad
        plain, turned = cast_rows(rows, is_mx, turned=for_weight)
        gathered = None if values is None or scales is None else Blocks(values, scales)
        # What FSDP gathers is freed and gathered again, in the same tensors.
        of_weight = (
            (None, None, None) if not for_rows else (weight, None, None) if gathered is None else (None, *gathered)
        )
        ctx.save_for_backward(*(turned or (None, None)), *of_weight)
        ctx.weight_dtype, ctx.is_mx = weight.dtype, is_mx
        assert plain is not None
        return multiply(plain, gathered or cast_weight(weight, is_mx), torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (gradient,) = gradients
        columns, scales, weight, values, weight_scales = ctx.saved_tensors
        needs_rows = weight is not None or values is not None
        plain, turned = cast_rows(gradient, ctx.is_mx, plain=needs_rows, turned=columns is not None)
        for_rows = for_weight = None
        if plain is not None:
            of_weight = (
                Blocks(values.t(), weight_scales.t()) if weight is None else cast_weight(weight, ctx.is_mx, turned=True)
            )
            for_rows = multiply(plain, of_weight, torch.bfloat16)
        if turned is not None:
            for_weight = multiply(turned, Blocks(columns, scales), ctx.weight_dtype)
        return for_rows, for_weight, None, None, None


def cast_rows(
    x: Tensor, is_mx: bool, *, plain: bool = True, turned: bool = True
) -> tuple[Blocks | None, Blocks | None]:
    """Return a matrix, and its transpose, in fp8 with blocks along their columns; None for what is not asked for."""
    if is_mx or not has_kernels(x.device.type):
        cast = in_mx_blocks if is_mx else in_row_blocks
        return cast(x) if plain else None, cast(x.t()) if turned else None
    values, scales, turned_values, turned_scales = torch.ops.trimaran.fp8_row_blocks(x, plain, turned)
    return (
        Blocks(values, scales.t()) if plain else None,
        Blocks(turned_values, turned_scales.t()) if turned else None,
    )  # fmt: skip


def cast_weight(weight: Tensor, is_mx: bool = False, *, turned: bool = False) -> Blocks:
    if is_mx or not has_kernels(weight.device.type):
        return (in_mx_blocks if is_mx else in_square_blocks)(weight.t() if turned else weight)
    return Blocks(*torch.ops.trimaran.fp8_square_blocks(weight, turned))


def multiply(left: Blocks, right: Blocks, dtype: torch.dtype) -> Tensor:
    """Return `left @ right.T`. Blocks lie along the columns of both."""
    return torch.ops.trimaran.fp8_block_matmul(*left, *right, dtype)


def _multiply(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Return `left @ right.T`. On a CPU the values are multiplied in fp32."""
    if left.is_cpu:
        with torch.autocast("cpu", enabled=False):  # in bf16 a CPU without its instructions is a hundred times slower
            return (dequantized(Blocks(left, left_scales)) @ dequantized(Blocks(right, right_scales)).t()).to(dtype)
    left, right = left.contiguous(), right.contiguous()
    if left_scales.dtype == torch.uint8:
        # A Blackwell GPU reads scales in tiles of 128x4.
        kinds = {"scale_recipe_a": F.ScalingType.BlockWise1x32, "scale_recipe_b": F.ScalingType.BlockWise1x32}
        tiles = {"swizzle_a": F.SwizzleType.SWIZZLE_32_4_4, "swizzle_b": F.SwizzleType.SWIZZLE_32_4_4}
        return F.scaled_mm(
            left, right.t(), scale_a=in_tiles(left_scales), scale_b=in_tiles(right_scales),
            output_dtype=torch.bfloat16, **kinds, **tiles,
        ).to(dtype)  # fmt: skip
    tall = F.ScalingType.BlockWise128x128
    is_square = right_scales.shape[0] != right.shape[0]
    of_right = F.pad(right_scales, (0, -right_scales.shape[1] % L4)) if is_square else right_scales.t()
    return F.scaled_mm(
        left,
        right.t(),
        left_scales.t().contiguous().t(),
        F.ScalingType.BlockWise1x128,
        of_right.contiguous().t(),
        tall if is_square else F.ScalingType.BlockWise1x128,
        output_dtype=dtype,
    )


def in_tiles(scales: Tensor) -> Tensor:
    """Return e8m0 scales [rows, columns] in the order of cuBLAS: tiles of 128x4, each as 32 rows of 4x4, flat."""
    rows, columns = scales.shape
    padded = F.pad(scales, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)


define_operator(
    "fp8_block_matmul(Tensor left, Tensor left_scales, Tensor right, Tensor right_scales, ScalarType dtype) -> Tensor",
    _multiply,
    lambda left, left_scales, right, right_scales, dtype: left.new_empty(len(left), len(right), dtype=dtype),
)


def _row_blocks(x: Tensor, plain: bool, turned: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a matrix in fp8 and its scales, transposed, and the same of its transpose, see `row_blocks`."""
    out = _empty_row_blocks(x, plain, turned)
    if not x.is_cpu:
        from trimaran.nets.kernels.fp8_block_casts import row_blocks  # noqa: PLC0415  needs Triton

        row_blocks(x, *out)
        return out
    for number, source in ((0, x if plain else None), (2, x.t() if turned else None)):
        if source is not None:
            values, scales = in_row_blocks(source)
            out[number].copy_(values)
            out[number + 1].copy_(scales.t())
    return out


def _empty_row_blocks(x: Tensor, plain: bool, turned: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return memory for `_row_blocks`; that of what is not asked for is empty."""
    rows, width = x.shape
    one, other = (rows, width) if plain else (0, 0), (width, rows) if turned else (0, 0)
    return (
        x.new_empty(one, dtype=DTYPE), x.new_empty(one[1] // FP8_BLOCK, one[0], dtype=torch.float32),
        x.new_empty(other, dtype=DTYPE), x.new_empty(other[1] // FP8_BLOCK, other[0], dtype=torch.float32),
    )  # fmt: skip


def _square_blocks(x: Tensor, turned: bool) -> tuple[Tensor, Tensor]:
    values, scales = out = _empty_square_blocks(x, turned)
    if not x.is_cpu:
        from trimaran.nets.kernels.fp8_block_casts import square_blocks  # noqa: PLC0415  needs Triton

        square_blocks(x, values, scales, turned=turned)
    else:
        for target, source in zip(out, in_square_blocks(x.t() if turned else x), strict=True):
            target.copy_(source)
    return out


def _empty_square_blocks(x: Tensor, turned: bool) -> tuple[Tensor, Tensor]:
    rows, width = reversed(x.shape) if turned else x.shape
    scales = x.new_empty(rows // FP8_BLOCK, width // FP8_BLOCK, dtype=torch.float32)
    return x.new_empty(rows, width, dtype=DTYPE), scales


define_operator(
    "fp8_row_blocks(Tensor x, bool plain, bool turned) -> (Tensor, Tensor, Tensor, Tensor)",
    _row_blocks,
    _empty_row_blocks,
)
define_operator("fp8_square_blocks(Tensor x, bool turned) -> (Tensor, Tensor)", _square_blocks, _empty_square_blocks)
