"""The compact form of a checkpoint's index, for many ranks. Imports no torch.

The parts of a tensor are a table with one row a part: file, offset, start and size in each dimension. It is stored by
columns, and a column as runs of numbers with equal differences: `first, difference, count`. Shards are regular, so a
column of 4,096 numbers has a few runs, and tensors of one shape share all columns but that of the offsets. The runs are
expanded only for the tensors that are asked for.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, overload

import numpy as np

from trimaran.parallel.tensor_regions import VALUE_BYTES, IndexEntry, TensorIndex, TensorMeta, TensorRegion, overlap

COMPACT = 2
"""The value of `format` in such an index; the older form has no such field."""
MAX_COUNT = 1 << 62
MAX_PARTS = 1 << 22  # of one tensor
MAX_NUMBERS = 1 << 26  # of all columns: a few bytes must not ask for all memory
Overlap = tuple[TensorRegion, tuple[int, ...], tuple[int, ...]]
"""A region, and start and size of what something else has in common with it."""


class CompactRegions(Sequence[TensorRegion]):
    """The regions of one tensor. Equal to a tuple with the same regions."""

    def __init__(self, files: Sequence[str], columns: Sequence["Column"]) -> None:
        self._files, self._columns = files, columns

    def __len__(self) -> int:
        return self._columns[0].length

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
            starts, sizes = self._columns[2 + dim].numbers(), self._columns[2 + num_dims + dim].numbers()
            is_common &= (starts < begin + extent) & (starts + sizes > begin)
        return tuple(self._rows(np.flatnonzero(is_common)))

    def _rows(self, chosen: np.ndarray) -> Iterator[TensorRegion]:
        numbers, offsets, *rest = (column.numbers()[chosen].tolist() for column in self._columns)
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


def compact_index_bytes(files: Sequence[str], tables: Mapping[str, tuple[TensorMeta, np.ndarray]]) -> bytes:
    """Return the index file. A table has a row for each part: file number, offset, start and size, sorted by start."""
    columns: dict[tuple[int, ...], int] = {}
    tensors: dict[str, Any] = {}
    for key, (meta, table) in sorted(tables.items()):
        runs = [tuple(runs_of(column)) for column in table.T]
        parts = [columns.setdefault(each, len(columns)) for each in runs]
        tensors[key] = {"dtype": meta.dtype, "shape": meta.shape, "parts": parts}
    fields = {"format": COMPACT, "files": files, "columns": [*columns], "tensors": tensors}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


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


class GridCheck:
    """Tells whether parts are the cells of a grid over their tensor, and so cover it exactly once.

    Almost all are, and tensors with the same columns are checked once.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], bool] = {}

    def covers(self, entry: IndexEntry) -> bool:
        if not isinstance(entry.regions, CompactRegions):
            return False
        columns = entry.regions._columns[2:]
        key = (entry.meta.shape, *map(id, columns))
        if key not in self._known:
            numbers = [column.numbers() for column in columns]
            middle = len(numbers) // 2
            self._known[key] = covers_grid(numbers[:middle], numbers[middle:], entry.meta.shape, len(entry.regions))
        return self._known[key]


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
