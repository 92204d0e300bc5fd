"""8-bit block-wise quantization with one scale per block of 256 values (Dettmers et al., arXiv 2110.02861)."""

import re
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from trimaran.nets.local_shards import is_dtensor
from trimaran.parallel.tensor_regions import TensorIndex

BLOCK = 256
DECADES = 7
SCALE_SUFFIX = "_scale"
SCALES_KEY = re.compile(r"optimizer/(\w+_scale)(?:@(\d+))?/(.+)", re.DOTALL)


@cache
def codebook(device: torch.device, *, signed: bool) -> Tensor:
    """Return the 256 values that codes stand for, in ascending order: from -1 to 1, or from 0 to 1.

    They span seven decades, with more values in the higher ones. They equal those of bitsandbytes.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - DECADES + 1)).tolist()
        values += middles + [-each for each in middles] * signed
    return torch.tensor(sorted(values), device=device)


@cache
def lower_bounds(device: torch.device, *, signed: bool) -> Tensor:
    """Return for each of the 256 codes the least value that rounds to it: half way to the code below."""
    book = codebook(device, signed=signed)
    return torch.cat([book.new_full((1,), -torch.inf), (book[1:] + book[:-1]) / 2])


def num_blocks(width: int) -> int:
    """Return how many scales a row has. A block never crosses a row, so shards of full rows have the same blocks."""
    return -(-width // BLOCK)


def quantize(values: Tensor, book: Tensor, *, lowest: int = 0) -> tuple[Tensor, Tensor]:
    """Return the uint8 codes of a 2-D fp32 tensor, and the scale of each block: its largest magnitude.

    `book` is a `codebook`. Codes below `lowest` are raised to it.
    """
    blocks = _in_blocks(values)
    scales = blocks.abs().amax(-1)
    relative = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    codes = torch.bucketize(relative, (book[1:] + book[:-1]) / 2, right=True, out_int32=True)
    return codes.clamp(min=lowest).to(torch.uint8).flatten(1)[:, : values.shape[1]], scales


def dequantize(codes: Tensor, scales: Tensor, book: Tensor) -> Tensor:
    """Return the fp32 values of codes and scales, in the shape of `codes`."""
    blocks = _in_blocks(book[codes.int()]) * scales[..., None]
    return blocks.flatten(1)[:, : codes.shape[1]]


def _in_blocks(table: Tensor) -> Tensor:
    """Return a 2-D tensor as [rows, blocks, values of a block]; the last block of a row is padded with zeros."""
    width = table.shape[1]
    block = min(BLOCK, width)
    padding = -width % block
    return (F.pad(table, (0, padding)) if padding else table).unflatten(1, (-1, block))


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The blocks of a tensor with `columns` columns that is sharded into `shard_columns` columns per rank.

    Each rank's first block starts at its first column. If all shards start at multiples of 256 columns, the blocks are
    those of the unsharded tensor. Otherwise the layout has a `suffix`, which is part of the checkpoint key of its
    scales.
    """

    columns: int
    shard_columns: int

    @property
    def num_blocks(self) -> int:
        full_shards, rest = divmod(self.columns, self.shard_columns)
        return full_shards * num_blocks(self.shard_columns) + num_blocks(rest)

    @property
    def suffix(self) -> str:
        is_unsharded = self.shard_columns == self.columns or self.shard_columns % BLOCK == 0
        return "" if is_unsharded else f"@{self.shard_columns}"

    def block(self, column: int) -> int:
        """Return the number of the block that a column is in."""
        shard, inside = divmod(column, self.shard_columns)
        return shard * num_blocks(self.shard_columns) + inside // BLOCK


def block_layout(parameter: Tensor) -> BlockLayout:
    """Return the block layout of the states of `parameter`, which follows from how its last dimension is sharded."""
    columns, num_shards = parameter.shape[-1], 1
    if is_dtensor(parameter):
        sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        num_shards = prod(size for size, placement in sizes if placement.is_shard(parameter.ndim - 1))
    return BlockLayout(columns, -(-columns // num_shards))


def saved_layouts(index: TensorIndex) -> dict[tuple[str, str], tuple[str, int]]:
    """Return, by state and parameter, the key of the saved scales and their shard columns; 0 if not sharded."""
    matches = ((key, SCALES_KEY.fullmatch(key)) for key in index)
    return {(match[1], match[3]): (key, int(match[2] or 0)) for key, match in matches if match is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReshard:
    """This rank's codes with the scales of another layout; `requantize` converts both to this rank's layout.

    `columns` are this rank's columns of the full tensor. `saved_scales` are those of all blocks that they overlap.
    """

    codes: Tensor
    scales: Tensor
    saved_scales: Tensor
    saved_layout: BlockLayout
    columns: range
    signed: bool

    def requantize(self) -> None:
        """Restore the values and quantize them again, since their blocks have other scales now."""
        book = codebook(self.codes.device, signed=self.signed)
        first = self.saved_layout.block(self.columns.start)
        numbers = [self.saved_layout.block(each) - first for each in self.columns]
        values = book[self.codes.int()] * self.saved_scales[..., torch.tensor(numbers, device=self.codes.device)]
        # A second moment never becomes zero, see `moments.EightBitMoments`.
        codes, scales = quantize(values.flatten(0, -2), book, lowest=0 if self.signed else 1)
        self.codes.copy_(codes.view(self.codes.shape))
        self.scales.copy_(scales.view(self.scales.shape))
