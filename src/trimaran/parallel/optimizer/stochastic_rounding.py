"""Stochastic rounding to bf16: up or down at random, so that the expected value is exact."""

import hashlib

import torch
from torch import Tensor

from trimaran.nets.local_shards import local_slices

IndexRuns = tuple[Tensor, int]
"""Element indices as runs of consecutive numbers: the int32 index that each run starts with, and their length."""


def to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 `values` as bf16. The lower 16 bits of the int32 `noise` decide: the nearer bf16 is more likely.

    NaN and Inf stay as they are.
    """
    bits = values.view(torch.int32)
    rounded = ((bits + (noise & 0xFFFF)) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def hash_text(key: str) -> int:
    """Return a 32-bit hash of `key`, as a signed number."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little", signed=True)


def index_runs(parameter: Tensor, rows: slice) -> IndexRuns:
    """Return the element indices of some rows of this rank's shard, counted in the full parameter.

    The shard is taken as 2-D, with the last dimension as its columns. An element has the same index on every rank that
    holds it. There is one run if at most the first dimension is sharded, otherwise one per row.
    """
    here, device = local_slices(parameter), parameter.device
    width = here[-1].stop - here[-1].start if here else 1
    if all(each == slice(0, size) for each, size in zip(here[1:], parameter.shape[1:], strict=True)):
        above = here[0].start * parameter.shape[1:].numel() if here else 0
        first = (above + rows.start * width + 2**31) % 2**32 - 2**31
        return torch.full((1,), first, device=device, dtype=torch.int32), (rows.stop - rows.start) * width
    starts = torch.zeros(1, device=device, dtype=torch.int64)
    for each, size in zip(here[:-1], parameter.shape, strict=False):
        starts = (starts[:, None] * size + torch.arange(each.start, each.stop, device=device)).flatten()
    # The cast, and all arithmetic after it, wraps around at 2^32.
    return (starts[rows] * parameter.shape[-1] + here[-1].start).int(), width


def hash_int32(number: Tensor) -> Tensor:
    """Return 32 pseudo-random bits, as int32, that depend only on the int32 `number`.

    This is Wellons' lowbias32. Unlike the numbers of a torch generator, these bits depend neither on the device nor on
    how many of them a rank draws: replicas round the same, and so do different plans.
    """
    number = (number ^ ((number >> 16) & 0xFFFF)) * 0x7FEB352D
    number = (number ^ ((number >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return number ^ ((number >> 16) & 0xFFFF)
