"""Where the parts of a tensor are: rectangles of a named whole, in files or in memory. No torch in here."""

from dataclasses import dataclass
from math import prod

VALUE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 1),
}
"""What a value takes, by safetensors' word for its kind."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor as no single rank may hold it. `dtype` is safetensors' word for it: F32, BF16, U8, ..."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """A rectangle of a whole, dimension by dimension from `start`, and where its bytes are."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    offset: int

    @property
    def num_values(self) -> int:
        return prod(self.size)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor and all its parts, which cover it without overlap."""

    whole: Whole
    parts: tuple[TensorRegion, ...]


Index = dict[str, Entry]
"""By key: `model/NAME` for weights and buffers, `optimizer/STATE/NAME` for what the optimizer keeps of a parameter."""


def overlap(
    start: tuple[int, ...], size: tuple[int, ...], other_start: tuple[int, ...], other_size: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return start and size of what two rectangles share, None when that is nothing. A scalar overlaps itself."""
    begin = tuple(map(max, start, other_start))
    ends = zip(start, size, other_start, other_size, strict=True)
    extent = tuple(min(a + n, b + m) - low for (a, n, b, m), low in zip(ends, begin, strict=True))
    return (begin, extent) if all(each > 0 for each in extent) else None
