"""Rounding to bf16 up or down by chance: what a single rounding loses is right on average over many."""

import hashlib

import torch
from torch import Tensor

from trimaran.nets.local_shards import local_slices

Runs = tuple[Tensor, int]


def to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 `values` in bf16. Of `noise`, int32, the lower sixteen bits decide: the nearer bf16 is the likelier.

    What is not finite stays what it is.
    """
    bits = values.view(torch.int32)
    rounded = ((bits + (noise & 0xFFFF)) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def salt(key: str) -> int:
    """Return 32 bits that belong to `key`, as the number that they are in an int32."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little", signed=True)


def runs(parameter: Tensor, rows: slice) -> Runs:
    """Return the numbers of the first values, int32, of runs of values that are numbered on, and the length of a run.

    The runs are those of some rows of this rank's part of `parameter`, which is a table whose rows are the last
    dimension. A value has the same number whoever holds it: its place in the whole. Where only the first dimension is
    split, or none, there is one run; otherwise each row is one.
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
    # The cast, and all arithmetic from here on, wraps around at 2^32.
    return (starts[rows] * parameter.shape[-1] + here[-1].start).int(), width


def scrambled(number: Tensor) -> Tensor:
    """Return 32 bits, int32, that look random and depend on the int32 `number` alone.

    This is Wellons' lowbias32. Unlike a generator's, these bits do not depend on the device, nor on how many of them a
    rank draws: replicas round alike, and so do plans.
    """
    number = (number ^ ((number >> 16) & 0xFFFF)) * 0x7FEB352D
    number = (number ^ ((number >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return number ^ ((number >> 16) & 0xFFFF)
