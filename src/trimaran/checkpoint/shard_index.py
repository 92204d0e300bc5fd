"""The index file of a checkpoint: which region of which tensor is in which file. Imports no torch."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from math import prod
from typing import Any

import numpy as np

from trimaran.checkpoint.compact_index import COMPACT, GridCheck, compact_index_bytes, covers_grid, parse_compact_index
from trimaran.core import UserError
from trimaran.parallel.tensor_regions import VALUE_BYTES, IndexEntry, TensorIndex, TensorMeta, TensorRegion, overlap

MAX_COUNT = 1 << 62
MAX_KEY_LENGTH = 2048
MIN_COMPACT_ROWS = 100_000
"""An index with more parts is written in the compact form. Others stay readable for every version."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardLayout:
    """The contents of one rank's files: rows of key, dtype, full shape, start, size, file, offset in the file.

    It is the same for every save, so it is sent once and then compared by its digest.
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


def is_compact(layouts: Sequence[ShardLayout], min_rows: int = MIN_COMPACT_ROWS) -> bool:
    """Return whether `index_bytes` writes the compact form."""
    return sum(len(layout.rows) for layout in layouts) > min_rows


@lru_cache(maxsize=1)  # equal for every save of a run, and large with thousands of ranks
def index_bytes(layouts: tuple[ShardLayout, ...], min_compact_rows: int = MIN_COMPACT_ROWS) -> bytes:
    """Return the index file with the rows of all ranks, which must cover each tensor exactly once."""
    if is_compact(layouts, min_compact_rows):
        return _compact_bytes(layouts)
    entries = merge(layouts)
    files = sorted({region.file for entry in entries.values() for region in entry.regions})
    number = {name: index for index, name in enumerate(files)}
    tensors = {
        key: {
            "dtype": entry.meta.dtype,
            "shape": entry.meta.shape,
            "parts": [[number[region.file], region.offset, *region.start, *region.size] for region in entry.regions],
        }
        for key, entry in sorted(entries.items())
    }
    return json.dumps({"files": files, "tensors": tensors}, separators=(",", ":")).encode() + b"\n"


def _compact_bytes(layouts: Sequence[ShardLayout]) -> bytes:
    """Return the index file in the compact form. The same checks as in `merge`, by columns."""
    files = sorted({row[5] for layout in layouts for row in layout.rows})
    number = {name: index for index, name in enumerate(files)}
    metas: dict[str, TensorMeta] = {}
    rows: dict[str, list[list[int]]] = defaultdict(list)
    for layout in layouts:
        for key, dtype, shape, start, size, file, offset in layout.rows:
            _check_meta(metas, key, dtype, shape)
            rows[key].append([number[file], offset, *start, *size])
    tables: dict[str, tuple[TensorMeta, np.ndarray]] = {}
    for key, meta in metas.items():
        table, num_dims = np.array(rows.pop(key), np.int64), len(meta.shape)
        if num_dims:
            table = table[np.lexsort([table[:, 2 + dim] for dim in reversed(range(num_dims))])]
        starts, sizes = table.T[2 : 2 + num_dims], table.T[2 + num_dims :]
        if not covers_grid([*starts], [*sizes], meta.shape, len(table)):
            regions = [TensorRegion(tuple(row[2 : 2 + num_dims]), tuple(row[2 + num_dims :]), "", row[1])
                       for row in table.tolist()]  # fmt: skip
            if wrong := coverage_error(IndexEntry(meta, tuple(regions))):
                raise AssertionError(f"{key}: {wrong}")
        tables[key] = meta, table
    return compact_index_bytes(files, tables)


def _check_meta(metas: dict[str, TensorMeta], key: str, dtype: str, shape: Sequence[int]) -> TensorMeta:
    """Return the meta of a tensor, which is the same on every rank, and has a valid name."""
    meta = metas.get(key)
    if meta is None:
        if wrong := key_error(key):
            raise UserError("K006", f"the checkpoint cannot be written: {wrong}", where=ascii(key)[:80],
                            fix="give the module or parameter another name")  # fmt: skip
        metas[key] = meta = TensorMeta(dtype, tuple(shape))
    if meta.dtype != dtype or meta.shape != tuple(shape):
        raise AssertionError(f"{key} is {meta} on one rank and {dtype} {shape} on another")
    return meta


def merge(layouts: Sequence[ShardLayout]) -> TensorIndex:
    """Return all rows by key. AssertionError if a tensor is covered twice or only partly: that is our bug."""
    regions: dict[str, list[TensorRegion]] = defaultdict(list)
    metas: dict[str, TensorMeta] = {}
    for layout in layouts:
        for key, dtype, shape, start, size, file, offset in layout.rows:
            _check_meta(metas, key, dtype, shape)
            regions[key].append(TensorRegion(tuple(start), tuple(size), file, offset))
    index = {key: IndexEntry(metas[key], tuple(sorted(regions[key], key=_first))) for key in metas}
    for key, entry in index.items():
        if wrong := coverage_error(entry):
            raise AssertionError(f"{key}: {wrong}")
    return index


def parse_index(text: bytes, sizes: Mapping[str, int]) -> TensorIndex:
    """Return the index in `text`. `sizes` are the bytes of each file. Raises ValueError if the index is invalid."""
    try:
        fields = json.loads(text)
        if fields.get("format") == COMPACT:
            return _checked(parse_compact_index(fields, sizes))
        files = [str(name) for name in fields["files"]]
        index = {str(key): _entry(tensor, files) for key, tensor in fields["tensors"].items()}
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not an index ({type(error).__name__})") from None
    for key, entry in index.items():
        width = VALUE_BYTES[entry.meta.dtype]
        for region in entry.regions:
            if not 0 <= region.offset <= region.offset + region.num_values * width <= sizes.get(region.file, -1):
                raise ValueError(f"a part of {key} lies outside of {region.file}")
    return _checked(index)


def _checked(index: TensorIndex) -> TensorIndex:
    """Return the index if all names are valid and the parts cover each tensor exactly once; else raise ValueError."""
    grid = GridCheck()
    for key, entry in index.items():
        if wrong := key_error(key) or ("" if grid.covers(entry) else coverage_error(entry)):
            raise ValueError(wrong if key_error(key) else f"{key}: {wrong}")
    return index


def key_error(key: str) -> str:
    """Return why `key` is not a name of a tensor; an empty text if it is. Exports use names in files and messages."""
    if not key.isprintable():
        return f"the tensor name {key[:80]!a} has characters that cannot be printed"
    if len(key) > MAX_KEY_LENGTH:
        return f"the tensor name {key[:80]!a}... is longer than {MAX_KEY_LENGTH:,} characters"
    if key.startswith("/") or not {".", ".."}.isdisjoint(key.split("/")):
        return f"the tensor name {key[:80]!a} is a path"
    return ""


def coverage_error(entry: IndexEntry) -> str:
    """Return how the regions fail to cover their tensor exactly once; an empty text if they do cover it."""
    shape = entry.meta.shape
    if _are_row_blocks(entry):
        return ""
    for region in entry.regions:
        spans = zip(region.start, region.size, shape, strict=True)
        if not all(begin >= 0 and extent > 0 and begin + extent <= limit for begin, extent, limit in spans):
            return f"the part at {region.start} reaches out of the tensor"
    covered = sum(region.num_values for region in entry.regions)
    if covered != prod(shape):
        return f"{covered:,} of {prod(shape):,} values are there"
    return _overlapping(entry)


def _are_row_blocks(entry: IndexEntry) -> bool:
    """Return whether the regions are consecutive blocks of full rows. Most tensors are, and the check is fast."""
    if not entry.meta.shape:
        return len(entry.regions) == 1
    num_rows, *rest = entry.meta.shape
    row_size, row_start, reached = tuple(rest), (0,) * len(rest), 0
    for region in entry.regions:
        if (
            region.start[0] != reached
            or region.start[1:] != row_start
            or region.size[1:] != row_size
            or region.size[0] <= 0
        ):
            return False
        reached += region.size[0]
    return reached == num_rows


def _overlapping(entry: IndexEntry) -> str:
    """Return which regions overlap. Sweeps along the dimension with the most starts, so that few are active at once."""
    if len(entry.regions) < 2:
        return ""
    dimensions = range(len(entry.meta.shape))
    dimension = max(dimensions, key=lambda each: len({region.start[each] for region in entry.regions}))
    active: list[TensorRegion] = []
    for region in sorted(entry.regions, key=lambda each: each.start[dimension]):
        active = [each for each in active if each.start[dimension] + each.size[dimension] > region.start[dimension]]
        if any(overlap(region.start, region.size, each.start, each.size) for each in active):
            return f"two parts cover {region.start}"
        active.append(region)
    return ""


def _entry(tensor: Any, files: Sequence[str]) -> IndexEntry:
    meta = TensorMeta(tensor["dtype"], tuple(map(_count, tensor["shape"])))
    VALUE_BYTES[meta.dtype]
    regions, middle, length = [], 2 + len(meta.shape), 2 + 2 * len(meta.shape)
    for row in tensor["parts"]:
        if len(row) != length:
            raise ValueError("a part has another number of dimensions than its tensor")
        if {*map(type, row)} != {int} or min(row) < 0 or max(row) >= MAX_COUNT:
            raise ValueError(f"{str(row)[:80]!r} are not all counts")
        regions.append(TensorRegion(tuple(row[2:middle]), tuple(row[middle:]), files[row[0]], row[1]))
    return IndexEntry(meta, tuple(regions))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def _first(region: TensorRegion) -> tuple[int, ...]:
    return region.start
