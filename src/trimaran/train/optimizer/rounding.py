"""Rounding to bf16 up or down by chance: what a single rounding loses is right on average over many."""

import hashlib

import torch
from torch import Tensor

from trimaran.nets.shards import local_slices


def to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 `values` in bf16. Of `noise`, int32, the lower sixteen bits decide: the nearer bf16 is the likelier.

    What is not finite stays what it is.
    """
    bits = values.view(torch.int32)
    rounded = ((bits + (noise & 0xFFFF)) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def numbers(parameter: Tensor, rows: slice, *, key: str) -> tuple[Tensor, Tensor]:
    """Return int32 vectors, for rows and columns: their sums number the values of this rank's part of `parameter`.

    A value has the same number whoever holds it, and another at another `key`. The part is a table whose rows are the
    last dimension; `rows` says which of them are meant.
    """
    digest = hashlib.sha256(key.encode()).digest()
    device, here = parameter.device, local_slices(parameter)
    start = torch.full((1,), int.from_bytes(digest[:4], "little"), device=device, dtype=torch.int64)
    for each, size in zip(here[:-1], parameter.shape, strict=False):
        start = (start[:, None] * size + torch.arange(each.start, each.stop, device=device)).flatten()
    width = parameter.shape[-1] if parameter.ndim else 1
    columns = here[-1] if here else slice(0, 1)
    # The casts, and all arithmetic from here on, wrap around at 2^32.
    return (start[rows] * width).int(), torch.arange(columns.start, columns.stop, device=device).int()


def scrambled(number: Tensor) -> Tensor:
    """Return 32 bits, int32, that look random and depend on the int32 `number` alone.

    This is Wellons' lowbias32. Unlike a generator's, these bits do not depend on the device, nor on how many of them a
    rank draws: replicas round alike, and so do plans.
    """
    number = (number ^ ((number >> 16) & 0xFFFF)) * 0x7FEB352D
    number = (number ^ ((number >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return number ^ ((number >> 16) & 0xFFFF)
