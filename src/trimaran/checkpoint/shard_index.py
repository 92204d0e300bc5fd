"""Which rectangle of which tensor is where, over all files of a checkpoint. No torch in here."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from math import prod
from typing import Any

from trimaran.checkpoint.tensor_regions import VALUE_BYTES, Entry, Index, TensorRegion, Whole, overlap

LARGEST = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class ShardLayout:
    """What the files of one rank hold: rows of key, dtype, shape of the whole, start, size, file, offset in the file.

    It stays the same from save to save, so that it is told once and compared by its digest.
    """

    digest: str
    rows: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardLayout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def layout_of(rows: Sequence[Any]) -> ShardLayout:
    """Return the rows with their digest."""
    return ShardLayout(sha256(json.dumps(rows).encode()).hexdigest(), tuple(rows))


@lru_cache(maxsize=1)  # every save of a run has the same, and with thousands of ranks it is not small
def index_bytes(layouts: tuple[ShardLayout, ...]) -> bytes:
    """Return the file that lists all rows of all ranks, after making sure that they cover each tensor just once."""
    entries = merge(layouts)
    files = sorted({part.file for entry in entries.values() for part in entry.parts})
    number = {name: place for place, name in enumerate(files)}
    tensors = {
        key: {
            "dtype": entry.whole.dtype,
            "shape": entry.whole.shape,
            "parts": [[number[part.file], part.offset, *part.start, *part.size] for part in entry.parts],
        }
        for key, entry in sorted(entries.items())
    }
    return json.dumps({"files": files, "tensors": tensors}, separators=(",", ":")).encode() + b"\n"


def merge(layouts: Sequence[ShardLayout]) -> Index:
    """Return all rows by key. That a tensor is covered twice or in part is a mistake of ours: AssertionError."""
    parts: dict[str, list[TensorRegion]] = defaultdict(list)
    wholes: dict[str, Whole] = {}
    for layout in layouts:
        for key, dtype, shape, start, size, file, offset in layout.rows:
            whole = wholes.get(key)
            if whole is None:
                wholes[key] = whole = Whole(dtype, tuple(shape))
            if whole.dtype != dtype or whole.shape != tuple(shape):
                raise AssertionError(f"{key} is {whole} on one rank and {dtype} {shape} on another")
            parts[key].append(TensorRegion(tuple(start), tuple(size), file, offset))
    index = {key: Entry(wholes[key], tuple(sorted(parts[key], key=_first))) for key in wholes}
    for key, entry in index.items():
        if wrong := gap(entry):
            raise AssertionError(f"{key}: {wrong}")
    return index


def parse_index(text: bytes, sizes: Mapping[str, int]) -> Index:
    """Return the index that `text` is. `sizes` are the bytes of each file. Raises ValueError for what cannot be."""
    try:
        fields = json.loads(text)
        files = [str(name) for name in fields["files"]]
        index = {str(key): _entry(tensor, files) for key, tensor in fields["tensors"].items()}
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not an index ({type(error).__name__})") from None
    for key, entry in index.items():
        width = VALUE_BYTES[entry.whole.dtype]
        for part in entry.parts:
            if not 0 <= part.offset <= part.offset + part.num_values * width <= sizes.get(part.file, -1):
                raise ValueError(f"a part of {key} lies outside of {part.file}")
        if wrong := gap(entry):
            raise ValueError(f"{key}: {wrong}")
    return index


def gap(entry: Entry) -> str:
    """Return how the parts fail to cover their whole just once; empty when they do not fail."""
    shape = entry.whole.shape
    if _stacked(entry):
        return ""
    for part in entry.parts:
        spans = zip(part.start, part.size, shape, strict=True)
        if not all(begin >= 0 and extent > 0 and begin + extent <= room for begin, extent, room in spans):
            return f"the part at {part.start} reaches out of the tensor"
    covered = sum(part.num_values for part in entry.parts)
    if covered != prod(shape):
        return f"{covered:,} of {prod(shape):,} values are there"
    return _doubled(entry)


def _stacked(entry: Entry) -> bool:
    """Return whether the parts are the rows of the whole, one block below the other: so are most, and it is quick."""
    if not entry.whole.shape:
        return len(entry.parts) == 1
    num_rows, *rest = entry.whole.shape
    sides, corner, reached = tuple(rest), (0,) * len(rest), 0
    for part in entry.parts:
        if part.start[0] != reached or part.start[1:] != corner or part.size[1:] != sides or part.size[0] <= 0:
            return False
        reached += part.size[0]
    return reached == num_rows


def _doubled(entry: Entry) -> str:
    """Return which parts overlap. They are swept along the dimension with most cuts, so that few are open at once."""
    if len(entry.parts) < 2:
        return ""
    dimensions = range(len(entry.whole.shape))
    dimension = max(dimensions, key=lambda each: len({part.start[each] for part in entry.parts}))
    active: list[TensorRegion] = []
    for part in sorted(entry.parts, key=lambda each: each.start[dimension]):
        active = [each for each in active if each.start[dimension] + each.size[dimension] > part.start[dimension]]
        if any(overlap(part.start, part.size, each.start, each.size) for each in active):
            return f"two parts cover {part.start}"
        active.append(part)
    return ""


def _entry(tensor: Any, files: Sequence[str]) -> Entry:
    whole = Whole(tensor["dtype"], tuple(map(_count, tensor["shape"])))
    VALUE_BYTES[whole.dtype]
    parts, middle, length = [], 2 + len(whole.shape), 2 + 2 * len(whole.shape)
    for row in tensor["parts"]:
        if len(row) != length:
            raise ValueError("a part has another number of dimensions than its tensor")
        if {*map(type, row)} != {int} or min(row) < 0 or max(row) >= LARGEST:
            raise ValueError(f"{str(row)[:80]!r} are not all counts")
        parts.append(TensorRegion(tuple(row[2:middle]), tuple(row[middle:]), files[row[0]], row[1]))
    return Entry(whole, tuple(parts))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def _first(part: TensorRegion) -> tuple[int, ...]:
    return part.start
