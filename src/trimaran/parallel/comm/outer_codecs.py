"""Formats of outer gradients on the wire: bf16, int8 with a scale per block, and the largest values of a block."""

from typing import Protocol

import torch
from torch import Tensor

from trimaran.core.replica_sync import INT8_BLOCK, SPARSE_BLOCK, SPARSE_LEVEL_BYTES
from trimaran.parallel.comm.block_codes import int8_message, read_int8


class Codec(Protocol):
    """Turns rows of fp32 values [rows, n] into rows of bytes and back. `n` must be a multiple of `block`."""

    block: int

    def encode(self, values: Tensor) -> Tensor: ...

    def decode(self, encoded: Tensor) -> Tensor: ...


class Bf16Codec:
    """Rounds to bf16."""

    block = 1

    def encode(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: Tensor) -> Tensor:
        return encoded.view(torch.bfloat16).float()


class Int8Codec:
    """Rounds to the nearest of 255 levels between plus and minus the largest magnitude of each block."""

    block = INT8_BLOCK

    def encode(self, values: Tensor) -> Tensor:
        return int8_message(values.view(len(values), -1, INT8_BLOCK), noise=0.5)

    def decode(self, encoded: Tensor) -> Tensor:
        return read_int8(encoded, INT8_BLOCK)


class SparseCodec:
    """Keeps the `kept` largest magnitudes of each block, each as one of two magnitudes and a sign: 2 bits.

    The two magnitudes of a block are the means of the kept values above and below their mean. Rows are blocks.
    """

    block = SPARSE_BLOCK

    def __init__(self, kept: int) -> None:
        assert kept % 4 == 0, "four levels are a byte"
        self._kept = kept

    def encode(self, values: Tensor) -> Tensor:
        indices = values.abs().topk(self._kept, dim=1).indices
        kept = values.gather(1, indices)
        magnitudes = kept.abs()
        is_large = magnitudes > magnitudes.mean(1, keepdim=True)
        levels = torch.stack([_masked_mean(magnitudes, ~is_large), _masked_mean(magnitudes, is_large)], 1)
        codes = is_large.to(torch.uint8) + 2 * (kept < 0).to(torch.uint8)
        packed = codes[:, 0::4] | codes[:, 1::4] << 2 | codes[:, 2::4] << 4 | codes[:, 3::4] << 6
        return torch.cat([_pack_12_bits(indices), packed, levels.view(torch.uint8)], 1)

    def decode(self, encoded: Tensor) -> Tensor:
        parts = encoded.split([self._kept // 2 * 3, self._kept // 4, SPARSE_LEVEL_BYTES], 1)
        packed, levels = parts[1], parts[2].clone().view(torch.float32)  # aligned
        codes = torch.stack([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], 2).flatten(1).long()
        values = levels.gather(1, codes & 1) * (1 - (codes & 2)).float()
        dense = torch.zeros(len(encoded), SPARSE_BLOCK, device=encoded.device)
        return dense.scatter_(1, _unpack_12_bits(parts[0]), values)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row over `mask`; 0 where the mask is empty."""
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def _pack_12_bits(numbers: Tensor) -> Tensor:
    """Return pairs of numbers below 4096 as three bytes each."""
    first, second = numbers[:, 0::2], numbers[:, 1::2]
    return torch.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], 2).flatten(1).to(torch.uint8)


def _unpack_12_bits(packed: Tensor) -> Tensor:
    high, middle, low = packed.long().view(len(packed), -1, 3).unbind(2)
    return torch.stack([high << 4 | middle >> 4, (middle & 15) << 8 | low], 2).flatten(1)
