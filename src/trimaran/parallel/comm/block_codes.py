"""Gradients as int8 or as signs, with one fp32 scale for each block of values."""

import torch
from torch import Tensor

INT8_MAX = 127
BITS = 8


def int8_message(blocks: Tensor, noise: Tensor | float) -> Tensor:
    """Return `blocks` [..., blocks, block] in fp32 as bytes [..., bytes]: int8 codes, then the fp32 scales.

    If `noise` is uniform in [0, 1), values are rounded up or down at random, so that the expected value is exact; 0.5
    rounds to the nearest. The largest value of a block is exact. A block with a NaN or Inf is not finite when it is
    read.
    """
    scales = blocks.abs().amax(-1, keepdim=True) / INT8_MAX
    inverse = torch.where(scales >= torch.finfo(torch.float32).tiny, 1 / scales, 0.0)  # else zeros, or a NaN
    codes = (blocks * inverse).add_(noise).floor_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    bytes_of = [each.flatten(-2).contiguous().view(torch.uint8) for each in (codes, scales)]
    return torch.cat(bytes_of, dim=-1)


def read_int8(message: Tensor, block: int) -> Tensor:
    """Return the values [..., values] of messages [..., bytes]."""
    num_blocks = message.shape[-1] // (block + 4)
    codes, scales = message.split([num_blocks * block, num_blocks * 4], dim=-1)
    values = codes.contiguous().view(torch.int8).float().unflatten(-1, (num_blocks, block))
    return (values * scales.contiguous().view(torch.float32).unsqueeze(-1)).flatten(-2)


def sign_message(blocks: Tensor, counts: Tensor) -> Tensor:
    """Return `blocks` [blocks, block] in fp32 as bytes: a bit for each sign, then the fp32 scales.

    The scale of a block is the mean of its absolute values. `counts` is how many values each block has; those after
    are padding of zeros.
    """
    scales = blocks.abs().sum(-1) / counts
    bits = (blocks >= 0).view(-1, BITS).to(torch.uint8)
    packed = (bits * _bit_values(blocks.device)).sum(-1, dtype=torch.uint8)
    return torch.cat([packed, scales.view(torch.uint8)])


def read_signs(message: Tensor, block: int) -> Tensor:
    """Return the values [blocks, block] of a message."""
    num_blocks = len(message) // (block // BITS + 4)
    packed, scales = message.split([num_blocks * block // BITS, num_blocks * 4])
    bits = (packed.unsqueeze(-1) & _bit_values(message.device)) != 0
    signs = bits.view(num_blocks, block).float().mul_(2).sub_(1)
    return signs.mul_(scales.contiguous().view(torch.float32).unsqueeze(-1))


def _bit_values(device: torch.device) -> Tensor:
    return 2 ** torch.arange(BITS, device=device, dtype=torch.uint8)
