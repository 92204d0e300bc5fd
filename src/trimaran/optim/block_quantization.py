"""Values in eight bits each, with a scale for every block of 256 (Dettmers et al., arXiv 2110.02861)."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
DECADES = 7


@cache
def codebook(device: torch.device, *, signed: bool) -> Tensor:
    """Return the 256 values, rising, that codes stand for: from -1 to 1, or from 0 to 1.

    They span seven decades, of which the upper ones are the finer. The maps are those of bitsandbytes.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - DECADES + 1)).tolist()
        values += middles + [-each for each in middles] * signed
    return torch.tensor(sorted(values), device=device)


@cache
def edges(device: torch.device, *, signed: bool) -> Tensor:
    """Return for each of 256 codes the least value that it stands for: half way to the code before it."""
    book = codebook(device, signed=signed)
    return torch.cat([book.new_full((1,), -torch.inf), (book[1:] + book[:-1]) / 2])


def num_blocks(width: int) -> int:
    """Return how many scales a row has. A block never crosses a row, so shards of whole rows have the same blocks."""
    return -(-width // BLOCK)


def quantised(values: Tensor, book: Tensor, *, lowest: int = 0) -> tuple[Tensor, Tensor]:
    """Return the codes, uint8, of a table of fp32 values, and the scale of each block: its largest magnitude.

    Codes below `lowest` are raised to it.
    """
    blocks = _in_blocks(values)
    scales = blocks.abs().amax(-1)
    relative = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    codes = torch.bucketize(relative, (book[1:] + book[:-1]) / 2, right=True, out_int32=True)
    return codes.clamp(min=lowest).to(torch.uint8).flatten(1)[:, : values.shape[1]], scales


def restored(codes: Tensor, scales: Tensor, book: Tensor) -> Tensor:
    """Return the table of fp32 values that codes and scales stand for."""
    blocks = _in_blocks(book[codes.int()]) * scales[..., None]
    return blocks.flatten(1)[:, : codes.shape[1]]


def _in_blocks(table: Tensor) -> Tensor:
    """Return a table as [rows, blocks, values of a block]; the last block of a row is filled up with zeros."""
    width = table.shape[1]
    block = min(BLOCK, width)
    padding = -width % block
    return (F.pad(table, (0, padding)) if padding else table).unflatten(1, (-1, block))
