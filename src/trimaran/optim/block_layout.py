"""Where the blocks of eight-bit states lie in a whole table, and how states cut elsewhere become this rank's."""

import re
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trimaran.checkpoint.tensor_regions import Index
from trimaran.optim.block_quantization import BLOCK, codebook, num_blocks, quantised

SCALE = "_scale"
SCALES = re.compile(r"optimizer/(\w+_scale)(?:@(\d+))?/(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The blocks of a table with so many `columns`, each `width` of which are cut into blocks of their own.

    A rank begins its first block where its columns begin. As long as every cut is at a multiple of 256 columns the
    blocks are those of the uncut table; otherwise the grid has a name of its own, by which its scales are kept.
    """

    columns: int
    width: int

    @property
    def num_blocks(self) -> int:
        whole, rest = divmod(self.columns, self.width)
        return whole * num_blocks(self.width) + num_blocks(rest)

    @property
    def name(self) -> str:
        return "" if self.width == self.columns or self.width % BLOCK == 0 else f"@{self.width}"

    def block(self, column: int) -> int:
        """Return the number of the block that a column is in."""
        cut, inside = divmod(column, self.width)
        return cut * num_blocks(self.width) + inside // BLOCK


def block_layout_of(parameter: Tensor) -> BlockLayout:
    """Return the grid that the plan has cut the states of `parameter` into."""
    columns, cuts = parameter.shape[-1], 1
    if isinstance(parameter, DTensor):
        sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        cuts = prod(size for size, placement in sizes if placement.is_shard(parameter.ndim - 1))
    return BlockLayout(columns, -(-columns // cuts))


def saved_layouts(index: Index) -> dict[tuple[str, str], tuple[str, int]]:
    """Return, by state and parameter, the key of the scales that an index has, and the width of its cuts; 0 is none."""
    found = ((key, SCALES.fullmatch(key)) for key in index)
    return {(match[1], match[3]): (key, int(match[2] or 0)) for key, match in found if match is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReshard:
    """Codes of this rank with scales of another grid, which `settle` makes into codes and scales of this one's.

    `columns` are those of the whole table that are here; `kept` are the scales of all blocks that they touch.
    """

    codes: Tensor
    scales: Tensor
    kept: Tensor
    grid: BlockLayout
    columns: range
    signed: bool

    def settle(self) -> None:
        """Restore the values and round them once more. Their blocks have other scales now."""
        book = codebook(self.codes.device, signed=self.signed)
        first = self.grid.block(self.columns.start)
        blocks = torch.tensor([self.grid.block(each) - first for each in self.columns], device=self.codes.device)
        values = book[self.codes.int()] * self.kept[..., blocks]
        # A second moment is never called zero, see `moments`.
        codes, scales = quantised(values.flatten(0, -2), book, lowest=0 if self.signed else 1)
        self.codes.copy_(codes.view(self.codes.shape))
        self.scales.copy_(scales.view(self.scales.shape))
