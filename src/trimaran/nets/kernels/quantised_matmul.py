"""Matmuls of a few tokens with weights in 8 or 4 bits, which are read once and converted in registers."""

from typing import Literal, NamedTuple

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

VALUES_PER_THREAD = 16
GROUP = 128  # inputs of a step of a program's loop; in int4 those that share a scale
MIN_TOKENS, MAX_TOKENS = 16, 64  # of a program
MAX_SPLITS = 8
REDUCED_COLUMNS, ROWS = 1024, 64
Kind = Literal["fp8", "int8", "int4"]


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` [rows, width] in e4m3, and the fp32 scales [rows, 1] that its values were divided by."""
    x = x.contiguous()
    rows, width = x.shape
    out, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(rows, 1, device=x.device)
    block = triton.next_power_of_2(width)
    with torch.cuda.device(x.device):
        _fp8_rows[(rows,)](
            x, out, scales, width, BLOCK=block, num_warps=max(1, min(16, block // (32 * VALUES_PER_THREAD)))
        )
    return out, scales


@triton.jit
def _fp8_rows(x, out, scales, width, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    values = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-12) / 448.0  # the largest e4m3 value
    tl.store(scales + row, scale)
    tl.store(out + row * width + column, (values / scale).to(tl.float8e4nv), mask=mask)


class Tiles(NamedTuple):
    """How a matmul is split into programs: the fastest of six measured on an H200 with the layers of an 8B model."""

    columns: int
    warps: int
    stages: int
    programs_per_sm: int


TILES = {"fp8": Tiles(128, 8, 4, 1), "int8": Tiles(64, 4, 4, 2), "int4": Tiles(64, 4, 3, 4)}


def quantised_matmul(
    x: Tensor, weight: Tensor, scales: Tensor, *, kind: Kind, x_scales: Tensor | None, zeros: Tensor | None,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return x @ weight.T + bias in bf16, for `x` [tokens, inputs] and a weight with [outputs, inputs] values.

    fp8 and int8: `scales` [outputs]; fp8 also has fp8 `x` with `x_scales` [tokens]. int4: two values in each byte of a
    weight [outputs, inputs / 2]; the low halves of a group's 64 bytes are its first values. `scales` and `zeros`
    [groups, outputs] are those of each group; a value is (number - zero) * scale.
    """
    (tokens, inputs), outputs = x.shape, len(weight)
    block = max(MIN_TOKENS, min(MAX_TOKENS, triton.next_power_of_2(tokens)))
    tiles = TILES[kind]
    blocks = triton.cdiv(outputs, tiles.columns) * triton.cdiv(tokens, block)
    wanted = tiles.programs_per_sm * torch.cuda.get_device_properties(x.device).multi_processor_count
    splits = max(1, min(MAX_SPLITS, inputs // GROUP, wanted // blocks))
    parts = torch.empty(splits, tokens, outputs, device=x.device)
    out = torch.empty(tokens, outputs, dtype=torch.bfloat16, device=x.device)
    with torch.cuda.device(x.device):
        _partial_sums[(triton.cdiv(outputs, tiles.columns), triton.cdiv(tokens, block), splits)](
            x, weight, scales, scales if zeros is None else zeros, parts, tokens, outputs, inputs,
            IS_INT4=kind == "int4", GROUP=GROUP, COLUMNS=tiles.columns, TOKENS=block, SPLITS=splits,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        _reduce[(tokens, triton.cdiv(outputs, REDUCED_COLUMNS))](
            parts, scales, scales if x_scales is None else x_scales, out if bias is None else bias, out,
            tokens, outputs,
            SCALED=kind != "int4", X_SCALED=x_scales is not None, BIASED=bias is not None, SPLITS=splits,
            BLOCK=REDUCED_COLUMNS, num_warps=4,
        )  # fmt: skip
    return out


def dequantised(weight: Tensor, scales: Tensor, zeros: Tensor | None, *, kind: Kind) -> Tensor:
    """Return an int8 or int4 weight, see `quantised_matmul`, as bf16 [outputs, inputs]."""
    outputs, width = weight.shape
    inputs = 2 * width if kind == "int4" else width
    out = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=weight.device)
    with torch.cuda.device(weight.device):
        _dequantise[(triton.cdiv(outputs, ROWS), inputs // GROUP)](
            weight, scales, scales if zeros is None else zeros, out, outputs, inputs,
            IS_INT4=kind == "int4", GROUP=GROUP, ROWS=ROWS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _partial_sums(
    x, weight, scales, zeros, parts, tokens, outputs, inputs,
    IS_INT4: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Write the sums over a part of the inputs. The weight is the first operand: that one may be in registers."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    safe_column = tl.minimum(column, outputs - 1).to(tl.int64)  # instead of a mask
    safe_token = tl.minimum(token, tokens - 1).to(tl.int64)
    groups = inputs // GROUP
    each = tl.cdiv(groups, SPLITS)
    total = tl.zeros([COLUMNS, TOKENS], tl.float32)
    for group in range(split * each, tl.minimum((split + 1) * each, groups)):
        if IS_INT4:
            half = tl.arange(0, GROUP // 2)
            at = weight + safe_column[:, None] * (inputs // 2) + group * (GROUP // 2) + half[None, :]
            packed = tl.load(at)
            scale = tl.load(scales + group * outputs + safe_column).to(tl.float32)
            zero = (tl.load(zeros + group * outputs + safe_column).to(tl.float32) + 128.0).to(tl.bfloat16)[:, None]
            # With these exponent bits a number of 4 bits is the bf16 value 128 + number; a conversion would be slow.
            first = ((packed & 15).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - zero
            second = ((packed >> 4).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - zero
            at_x = x + safe_token[:, None] * inputs + group * GROUP + half[None, :]
            first_x = tl.load(at_x)
            second_x = tl.load(at_x + GROUP // 2)
            of_group = tl.dot(first, tl.trans(first_x))
            total += tl.dot(second, tl.trans(second_x), of_group) * scale[:, None]
        else:
            number = group * GROUP + tl.arange(0, GROUP)
            values = tl.load(weight + safe_column[:, None] * inputs + number[None, :])
            rows = tl.load(x + safe_token[:, None] * inputs + number[None, :])
            total = tl.dot(values.to(rows.dtype), tl.trans(rows), total)
    at = parts + (split.to(tl.int64) * tokens + token[None, :]) * outputs + column[:, None]
    tl.store(at, total, mask=(column < outputs)[:, None] & (token < tokens)[None, :])


@triton.jit
def _reduce(
    parts, scales, x_scales, bias, out, tokens, outputs,
    SCALED: tl.constexpr, X_SCALED: tl.constexpr, BIASED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < outputs
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * tokens + token) * outputs + column, mask=mask, other=0.0)
    if SCALED:
        total *= tl.load(scales + column, mask=mask, other=0.0).to(tl.float32)
    if X_SCALED:
        total *= tl.load(x_scales + token)
    if BIASED:
        total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * outputs + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _dequantise(
    weight, scales, zeros, out, outputs, inputs, IS_INT4: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr  # noqa: N803
):  # fmt: skip
    row, group = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    mask = row < outputs
    at_row = row[:, None].to(tl.int64) * inputs
    if IS_INT4:
        half = tl.arange(0, GROUP // 2)
        packed = tl.load(weight + at_row // 2 + group * (GROUP // 2) + half[None, :], mask=mask[:, None], other=0)
        scale = tl.load(scales + group * outputs + row, mask=mask, other=0.0).to(tl.float32)[:, None]
        zero = tl.load(zeros + group * outputs + row, mask=mask, other=0).to(tl.float32)[:, None]
        at = out + at_row + group * GROUP + half[None, :]
        tl.store(at, (((packed & 15).to(tl.float32) - zero) * scale).to(tl.bfloat16), mask=mask[:, None])
        tl.store(at + GROUP // 2, (((packed >> 4).to(tl.float32) - zero) * scale).to(tl.bfloat16), mask=mask[:, None])
    else:
        at = at_row + group * GROUP + tl.arange(0, GROUP)[None, :]
        scale = tl.load(scales + row, mask=mask, other=0.0).to(tl.float32)[:, None]
        values = tl.load(weight + at, mask=mask[:, None], other=0).to(tl.float32) * scale
        tl.store(out + at, values.to(tl.bfloat16), mask=mask[:, None])
