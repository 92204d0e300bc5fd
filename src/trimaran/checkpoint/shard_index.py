"""The index file of a checkpoint: which region of which tensor is in which file. Imports no torch.

It has a compact form for many ranks. There the parts of a tensor are a table with one row a part: file, offset, start
and size in each dimension. It is stored by columns, and a column as runs of numbers with equal differences: `first,
difference, count`. Shards are regular, so a column of 4,096 numbers has a few runs, and tensors of one shape share all
columns but that of the offsets. The runs are expanded only for the tensors that are asked for.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from math import prod
from typing import Any, overload

import numpy as np

from trimaran.core import UserError
from trimaran.parallel import VALUE_BYTES, IndexEntry, TensorIndex, TensorMeta, TensorRegion, overlap

COMPACT = 2  # the value of `format` in a compact index; the older form has no such field
MAX_COUNT = 1 << 62
MAX_PARTS = 1 << 22  # of one tensor
MAX_NUMBERS = 1 << 26  # of all columns: a few bytes must not ask for all memory
Overlap = tuple[TensorRegion, tuple[int, ...], tuple[int, ...]]
"""A region, and start and size of what something else has in common with it."""
MAX_KEY_LENGTH = 2048
MIN_COMPACT_ROWS = 100_000
"""An index with more parts is written in the compact form. Others stay readable for every version."""


class CompactRegions(Sequence[TensorRegion]):
    """The regions of one tensor. Equal to a tuple with the same regions."""

    def __init__(self, files: Sequence[str], columns: Sequence["Column"]) -> None:
        self._files, self.columns = files, columns

    def __len__(self) -> int:
        return self.columns[0].length

    @overload
    def __getitem__(self, index: int) -> TensorRegion: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TensorRegion, ...]: ...
    def __getitem__(self, index: int | slice) -> TensorRegion | tuple[TensorRegion, ...]:
        if isinstance(index, slice):
            return tuple(self._rows(np.arange(len(self))[index]))
        return next(self._rows(np.arange(len(self))[[index]]))

    def __iter__(self) -> Iterator[TensorRegion]:
        return self._rows(np.arange(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple | CompactRegions) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def overlapping(self, start: Sequence[int], size: Sequence[int]) -> tuple[TensorRegion, ...]:
        """Return the regions that have values in common with another one."""
        num_dims, is_common = len(start), np.ones(len(self), bool)
        for dim, (begin, extent) in enumerate(zip(start, size, strict=True)):
            starts, sizes = self.columns[2 + dim].numbers(), self.columns[2 + num_dims + dim].numbers()
            is_common &= (starts < begin + extent) & (starts + sizes > begin)
        return tuple(self._rows(np.flatnonzero(is_common)))

    def _rows(self, chosen: np.ndarray) -> Iterator[TensorRegion]:
        numbers, offsets, *rest = (column.numbers()[chosen].tolist() for column in self.columns)
        middle = len(rest) // 2
        starts = zip(*rest[:middle], strict=True) if middle else [()] * len(chosen)
        sizes = zip(*rest[middle:], strict=True) if middle else [()] * len(chosen)
        for number, offset, start, size in zip(numbers, offsets, starts, sizes, strict=True):
            yield TensorRegion(start, size, self._files[number], offset)


class Column:
    """Numbers as runs: rows of the first number, the difference to the next one, and how many there are."""

    def __init__(self, runs: np.ndarray) -> None:
        self._runs, self.length = runs, int(runs[:, 2].sum())

    def numbers(self) -> np.ndarray:
        first, step, counts = self._runs.T
        if len(first) == 1:
            return first[0] + step[0] * np.arange(counts[0])
        within = np.arange(self.length) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(first, counts) + np.repeat(step, counts) * within


def overlaps(regions: Sequence[TensorRegion], start: tuple[int, ...], size: tuple[int, ...]) -> list[Overlap]:
    """Return the regions that overlap another one, with start and size of what they have in common."""
    found = regions.overlapping(start, size) if isinstance(regions, CompactRegions) else regions
    return [(region, *both) for region in found if (both := overlap(start, size, region.start, region.size))]


def window(start: tuple[int, ...], size: tuple[int, ...], origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the region as slices of a tensor that begins at `origin`."""
    return tuple(slice(low - base, low - base + n) for low, n, base in zip(start, size, origin, strict=True))


def runs_of(numbers: np.ndarray) -> list[int]:
    """Return the runs of a column, one after the other."""
    differences, runs, begin = np.diff(numbers), list[int](), 0
    changes = np.append(np.flatnonzero(np.diff(differences)) + 1, len(differences))  # where another difference begins
    for change in changes.tolist():
        if begin < change:  # numbers `begin` to `change` have one difference; the next run begins after them
            runs += [int(numbers[begin]), int(differences[begin]), change - begin + 1]
            begin = change + 1
        if begin > len(differences):
            return runs
    return [*runs, int(numbers[begin]), 0, 1]


def parse_compact_index(fields: dict[str, Any], sizes: Mapping[str, int]) -> TensorIndex:
    """Return the index in `fields`. Raises ValueError, or what a field of a wrong type raises, if it is invalid.

    Not checked: that the parts cover the tensors, see `covers_grid`.
    """
    files = [str(name) for name in fields["files"]]
    columns = [_column(runs) for runs in fields["columns"]]
    if sum(column.length for column in columns) > MAX_NUMBERS:
        raise ValueError(f"it has more than {MAX_NUMBERS:,} numbers")
    lengths = np.array([sizes.get(name, -1) for name in files], np.int64)
    index: TensorIndex = {}
    for key, tensor in fields["tensors"].items():
        meta = TensorMeta(tensor["dtype"], tuple(map(_count, tensor["shape"])))
        chosen = [columns[_count(number)] for number in tensor["parts"]]
        if len(chosen) != 2 + 2 * len(meta.shape) or len({column.length for column in chosen}) != 1:
            raise ValueError("a tensor has another number of columns than its dimensions need")
        if wrong := _outside(meta, chosen, files, lengths):
            raise ValueError(f"a part of {str(key)[:80]} lies outside of {wrong}")
        index[str(key)] = IndexEntry(meta, CompactRegions(files, chosen))
    return index


def covers_grid(starts: Sequence[np.ndarray], sizes: Sequence[np.ndarray], shape: Sequence[int], num: int) -> bool:
    """Return whether `num` parts are all cells of a grid: in each dimension, intervals that follow each other."""
    cells, cell = 1, np.zeros(num, np.int64)
    for start, size, limit in zip(starts, sizes, shape, strict=True):
        begins, interval = np.unique(start, return_inverse=True)
        extents = np.zeros_like(begins)
        extents[interval] = size
        ends = begins + extents
        follow = begins[0] == 0 and ends[-1] == limit and bool((begins[1:] == ends[:-1]).all())
        if not follow or (extents[interval] != size).any() or (size <= 0).any():
            return False
        cells, cell = cells * len(begins), cell * len(begins) + interval
    return cells == num and len(np.unique(cell)) == num


def _outside(meta: TensorMeta, columns: Sequence[Column], files: Sequence[str], lengths: np.ndarray) -> str:
    """Return the file that a part does not lie in; an empty text if all parts lie in their files."""
    width, extents = VALUE_BYTES[meta.dtype], columns[2 + len(meta.shape) :]
    numbers, offsets = columns[0].numbers(), columns[1].numbers()
    if int(numbers.max()) >= len(files):
        raise ValueError("a part is in a file that is not listed")
    if prod((int(each.numbers().max()) for each in extents), start=width) >= MAX_COUNT:
        return files[int(numbers[0])]
    num_bytes = np.full(len(numbers), width, np.int64)
    for each in extents:
        num_bytes *= each.numbers()
    is_outside = offsets + num_bytes > lengths[numbers]
    return files[int(numbers[int(is_outside.argmax())])] if is_outside.any() else ""


def _column(runs: Any) -> Column:
    if not isinstance(runs, list) or not runs or len(runs) % 3 or {*map(type, runs)} != {int}:
        raise ValueError("a column is not a list of runs")
    total = 0
    for first, step, count in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        total += count
        if not 0 < count <= total <= MAX_PARTS:
            raise ValueError(f"a column has {total:,} numbers")
        if not (0 <= first < MAX_COUNT and 0 <= first + step * (count - 1) < MAX_COUNT and abs(step) < MAX_COUNT):
            raise ValueError("a column has numbers that are not counts")
    return Column(np.array(runs, np.int64).reshape(-1, 3))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


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
    tensors: dict[str, Any] = {}
    for key, entry in sorted(entries.items()):
        parts = [[number[each.file], each.offset, *each.start, *each.size] for each in entry.regions]
        tensors[key] = {"dtype": entry.meta.dtype, "shape": entry.meta.shape, "parts": parts}
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
    # A table has a row for each part: file number, offset, start and size, sorted by start.
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
    columns: dict[tuple[int, ...], int] = {}
    tensors: dict[str, Any] = {}
    for key, (meta, table) in sorted(tables.items()):
        parts = [columns.setdefault(tuple(runs_of(column)), len(columns)) for column in table.T]
        tensors[key] = {"dtype": meta.dtype, "shape": meta.shape, "parts": parts}
    fields = {"format": COMPACT, "files": files, "columns": [*columns], "tensors": tensors}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _check_meta(metas: dict[str, TensorMeta], key: str, dtype: str, shape: Sequence[int]) -> TensorMeta:
    """Return the meta of a tensor, which is the same on every rank, and has a valid name."""
    meta = metas.get(key)
    if meta is None:
        if wrong := key_error(key):
            raise UserError("K006.checkpoint-cannot-written-give", where=ascii(key)[:80], wrong=wrong)
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
    index = {key: IndexEntry(metas[key], tuple(sorted(regions[key], key=lambda region: region.start))) for key in metas}
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
        index: TensorIndex = {}
        for key, tensor in fields["tensors"].items():
            meta = TensorMeta(tensor["dtype"], tuple(map(_count, tensor["shape"])))
            VALUE_BYTES[meta.dtype]
            regions, middle, length = [], 2 + len(meta.shape), 2 + 2 * len(meta.shape)
            for row in tensor["parts"]:
                if len(row) != length:
                    raise ValueError("a part has another number of dimensions than its tensor")
                if {*map(type, row)} != {int} or min(row) < 0 or max(row) >= MAX_COUNT:
                    raise ValueError(f"{str(row)[:80]!r} are not all counts")
                regions.append(TensorRegion(tuple(row[2:middle]), tuple(row[middle:]), files[row[0]], row[1]))
            index[str(key)] = IndexEntry(meta, tuple(regions))
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
    grids: dict[tuple[Any, ...], bool] = {}  # by shape and columns: whether the parts are the cells of a grid
    for key, entry in index.items():
        if wrong := key_error(key):
            raise ValueError(wrong)
        if isinstance(entry.regions, CompactRegions):
            columns, shape = entry.regions.columns[2:], entry.meta.shape
            same = (shape, *map(id, columns))
            if same not in grids:
                numbers, middle = [column.numbers() for column in columns], len(columns) // 2
                grids[same] = covers_grid(numbers[:middle], numbers[middle:], shape, len(entry.regions))
            if grids[same]:
                continue
        if wrong := coverage_error(entry):
            raise ValueError(f"{key}: {wrong}")
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
    # Which regions overlap. Sweeps along the dimension with the most starts, so that few are active at once.
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


def _are_row_blocks(entry: IndexEntry) -> bool:
    """Return whether the regions are consecutive blocks of full rows. Most tensors are, and the check is fast."""
    if not entry.meta.shape:
        return len(entry.regions) == 1
    num_rows, *rest = entry.meta.shape
    row_size, row_start, reached = tuple(rest), (0,) * len(rest), 0
    for region in entry.regions:
        follows = region.start == (reached, *row_start)
        if not follows or region.size[1:] != row_size or region.size[0] <= 0:
            return False
        reached += region.size[0]
    return reached == num_rows
