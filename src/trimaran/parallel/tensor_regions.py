"""The index of a checkpoint: which region of which tensor is stored where. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

VALUE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 1),
}
"""Bytes per value, by the safetensors name of the dtype."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Dtype and shape of a full, unsharded tensor. `dtype` is the safetensors name: F32, BF16, U8, ..."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """A rectangular region of a tensor, `size` values from `start` in each dimension, and where its bytes are."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    offset: int

    @property
    def num_values(self) -> int:
        return prod(self.size)


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A tensor and all its regions, which cover it without overlap."""

    meta: TensorMeta
    regions: Sequence[TensorRegion]


TensorIndex = dict[str, IndexEntry]
"""By key: `model/NAME` for parameters and buffers, `optimizer/STATE/NAME` for the optimizer state of a parameter."""


def overlap(
    start: tuple[int, ...], size: tuple[int, ...], other_start: tuple[int, ...], other_size: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return start and size of the intersection of two regions; None if it is empty. Two scalars always intersect."""
    begin = tuple(map(max, start, other_start))
    ends = zip(start, size, other_start, other_size, strict=True)
    extent = tuple(min(a + n, b + m) - low for (a, n, b, m), low in zip(ends, begin, strict=True))
    return (begin, extent) if all(each > 0 for each in extent) else None
