"""In what two checkpoints differ. No torch in here."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from trimaran.checkpoint.step_files import StepFiles
from trimaran.checkpoint.tensor_regions import VALUE_BYTES, TensorRegion, Whole, overlap

NUMPY_DTYPES = {
    "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1",
    "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor that is not the same in both. `what` is a phrase; the rest is only there when both have it alike.

    `largest` is the largest distance of two values; None where values are compared as bytes only.
    """

    key: str
    what: str
    num_values: int = 0
    num_different: int = 0
    largest: float | None = None


def compare(one: Path, other: Path) -> list[TensorDifference]:
    """Return the tensors in which two checkpoints differ, however each was cut. Nothing is held but a part of each."""
    ours, theirs = StepFiles(one), StepFiles(other)
    found = []
    for key in sorted(ours.index.keys() | theirs.index.keys()):
        if key not in theirs.index or key not in ours.index:
            found.append(TensorDifference(key=key, what=f"is only in {(one if key in ours.index else other).name}"))
        elif (here := ours.index[key].whole) != (there := theirs.index[key].whole):
            found.append(TensorDifference(key=key, what=f"is {_words(here)} and {_words(there)}"))
        elif difference := _compare(key, ours, theirs):
            found.append(difference)
    return found


def _compare(key: str, ours: StepFiles, theirs: StepFiles) -> TensorDifference | None:
    whole = ours.index[key].whole
    num_different, largest = 0, 0.0
    for mine, its in _overlaps(key, ours, theirs):
        different = (mine != its).any(axis=-1)
        if count := int(different.sum()):
            num_different += count
            largest = max(largest, _distance(mine[different], its[different], whole.dtype))
    if not num_different:
        return None
    known = whole.dtype in (*NUMPY_DTYPES, "BF16")
    return TensorDifference(key=key, what="has other values", num_values=prod(whole.shape), num_different=num_different,
                      largest=largest if known else None)  # fmt: skip


def _overlaps(key: str, ours: StepFiles, theirs: StepFiles) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield what both have of the same rectangle: arrays of bytes, the last dimension being those of one value."""
    whole = ours.index[key].whole
    for part in ours.index[key].parts:
        for its in theirs.index[key].parts:
            if both := overlap(part.start, part.size, its.start, its.size):
                yield _window(ours, whole, part, both), _window(theirs, whole, its, both)


def _window(
    files: StepFiles, whole: Whole, part: TensorRegion, rectangle: tuple[tuple[int, ...], tuple[int, ...]]
) -> np.ndarray:
    start, size = rectangle
    values = files.bytes_of(whole, part).reshape(*part.size, VALUE_BYTES[whole.dtype])
    return values[
        tuple(slice(low - base, low - base + n) for low, n, base in zip(start, size, part.start, strict=True))
    ]


def _distance(mine: np.ndarray, its: np.ndarray, dtype: str) -> float:
    """Return how far apart two lists of values are at most; 0 where bytes are all that is known of the type."""
    if dtype == "BF16":  # the upper half of a float32
        mine, its = (np.pad(each, ((0, 0), (2, 0))) for each in (mine, its))
        dtype = "F32"
    if dtype not in NUMPY_DTYPES:
        return 0.0
    a, b = (np.ascontiguousarray(each).view(NUMPY_DTYPES[dtype]).astype(np.float64) for each in (mine, its))
    with np.errstate(invalid="ignore"):
        return float(np.nanmax(np.abs(a - b), initial=0.0))


def _words(whole: Whole) -> str:
    return f"{whole.dtype} {'x'.join(map(str, whole.shape))}"
