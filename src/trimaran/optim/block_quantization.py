"""8-bit block-wise quantization with one scale per block of 256 values (Dettmers et al., arXiv 2110.02861)."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
DECADES = 7


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
