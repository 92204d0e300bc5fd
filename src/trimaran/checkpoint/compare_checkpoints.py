"""Compares two checkpoints tensor by tensor. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from trimaran.checkpoint.compact_index import overlaps
from trimaran.checkpoint.step_files import StepFiles
from trimaran.parallel.tensor_regions import VALUE_BYTES, TensorMeta, TensorRegion

NUMPY_DTYPES = {
    "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1",
    "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor that differs. `what` is a phrase; the numbers are set if both tensors have the same shape and dtype.

    `largest` is the largest absolute difference of two values; None if the values are compared as bytes only.
    """

    key: str
    what: str
    num_values: int = 0
    num_different: int = 0
    largest: float | None = None


def compare(one: Path, other: Path) -> list[TensorDifference]:
    """Return the tensors that differ between two checkpoints, whatever their sharding. Reads one region at a time."""
    ours, theirs = StepFiles(one), StepFiles(other)
    found = []
    for key in sorted(ours.index.keys() | theirs.index.keys()):
        if key not in theirs.index or key not in ours.index:
            found.append(TensorDifference(key=key, what=f"is only in {(one if key in ours.index else other).name}"))
        elif (here := ours.index[key].meta) != (there := theirs.index[key].meta):
            found.append(TensorDifference(key=key, what=f"is {_describe(here)} and {_describe(there)}"))
        elif difference := _compare(key, ours, theirs):
            found.append(difference)
    return found


def _compare(key: str, ours: StepFiles, theirs: StepFiles) -> TensorDifference | None:
    meta = ours.index[key].meta
    num_different, largest = 0, 0.0
    for mine, its in _overlaps(key, ours, theirs):
        different = (mine != its).any(axis=-1)
        if count := int(different.sum()):
            num_different += count
            largest = max(largest, _distance(mine[different], its[different], meta.dtype))
    if not num_different:
        return None
    has_numbers = meta.dtype in (*NUMPY_DTYPES, "BF16")
    return TensorDifference(key=key, what="has different values", num_values=prod(meta.shape),
                            num_different=num_different,
                            largest=largest if has_numbers else None)  # fmt: skip


def _overlaps(key: str, ours: StepFiles, theirs: StepFiles) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the bytes of each region that both have; the last dimension of an array holds the bytes of one value."""
    meta = ours.index[key].meta
    for region in ours.index[key].regions:
        for its, start, size in overlaps(theirs.index[key].regions, region.start, region.size):
            yield _window(ours, meta, region, (start, size)), _window(theirs, meta, its, (start, size))


def _window(
    files: StepFiles, meta: TensorMeta, region: TensorRegion, window: tuple[tuple[int, ...], tuple[int, ...]]
) -> np.ndarray:
    start, size = window
    values = files.bytes_of(meta, region).reshape(*region.size, VALUE_BYTES[meta.dtype])
    return values[
        tuple(slice(low - base, low - base + n) for low, n, base in zip(start, size, region.start, strict=True))
    ]


def _distance(mine: np.ndarray, its: np.ndarray, dtype: str) -> float:
    """Return the largest absolute difference of two lists of values; 0 if the dtype is compared as bytes only."""
    if dtype == "BF16":  # the upper half of a float32
        mine, its = (np.pad(each, ((0, 0), (2, 0))) for each in (mine, its))
        dtype = "F32"
    if dtype not in NUMPY_DTYPES:
        return 0.0
    a, b = (np.ascontiguousarray(each).view(NUMPY_DTYPES[dtype]).astype(np.float64) for each in (mine, its))
    with np.errstate(invalid="ignore"):
        return float(np.nanmax(np.abs(a - b), initial=0.0))


def _describe(meta: TensorMeta) -> str:
    return f"{meta.dtype} {'x'.join(map(str, meta.shape))}"
