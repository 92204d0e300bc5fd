"""Reads a rank's slice of a parameter out of the tensor on disk that holds it, and joins parameters to such tensors."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from trimaran.models.families.disk_parts import DiskPart


def read_region(source: Any, part: DiskPart, here: tuple[slice, ...]) -> Tensor:
    """Return the values `here` of the parameter, or of its expert, that `part` holds. Nothing else is read.

    `source` is what safetensors' `get_slice` returns, or a tensor.
    """
    here = (*here[:-2], here[-1], here[-2]) if part.transposed else here
    wanted = iter(here)
    index: list[slice | int] = []
    steps: list[slice] = []
    for size, region in zip(part.shape, _full_region(part), strict=True):
        if isinstance(region, int):
            index.append(region)
            continue
        (start, stop, step), inner = region.indices(size), next(wanted)
        del stop
        index.append(slice(start + inner.start * step, max(start + (inner.stop - 1) * step + 1, start)))
        steps.append(slice(None, None, step))
    values = source[tuple(index)]
    if any(each.step != 1 for each in steps):  # safetensors reads ranges only
        values = values[tuple(steps)]
    return values.transpose(-2, -1) if part.transposed else values


def parameter_shape(part: DiskPart) -> tuple[int, ...]:
    """Return the shape of the parameter, or of its expert, that `part` holds."""
    pairs = zip(part.shape, _full_region(part), strict=True)
    shape = tuple(len(range(*each.indices(size))) for size, each in pairs if isinstance(each, slice))
    return (*shape[:-2], shape[-1], shape[-2]) if part.transposed else shape


def joined_tensors(items: Iterable[tuple[DiskPart, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors on disk by name, each as soon as all of its parts have come."""
    started: dict[str, tuple[Tensor, int]] = {}
    for part, value in items:
        if not part.region and not part.transposed:
            yield part.name, value
            continue
        whole, missing = started.get(part.name) or (torch.empty(part.shape, dtype=value.dtype), 0)
        missing = missing or whole.numel()
        whole[part.region].copy_(value.transpose(-2, -1) if part.transposed else value)
        if missing == value.numel():
            started.pop(part.name, None)
            yield part.name, whole
        else:
            started[part.name] = whole, missing - value.numel()
    assert not started, f"some parts of {list(started)} did not come"


def _full_region(part: DiskPart) -> tuple[slice | int, ...]:
    return (*part.region, *[slice(None)] * (len(part.shape) - len(part.region)))
