"""Verifies that a checkpoint is what was written, and compares two tensor by tensor. Imports no torch."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path

import numpy as np

from trimaran.checkpoint.durable import read_blocks
from trimaran.checkpoint.file_parts import ThreadBuffer, ThreadProgress, map_in_threads, num_io_threads
from trimaran.checkpoint.manifest import INDEX, MANIFEST, Damage, DamagedError, FileRecord, unreadable
from trimaran.checkpoint.shard_index import overlaps, window
from trimaran.checkpoint.step_files import StepFiles
from trimaran.core import UserError, open_regular_fd
from trimaran.parallel import VALUE_BYTES, TensorMeta, TensorRegion

WEIGHTS = "model/"  # the prefix of their keys
NUMPY_DTYPES = {
    "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1",
    "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


def verify(
    path: Path,
    *,
    files: Iterable[str] | None = None,
    report_progress: Callable[[], None] = lambda: None,
    num_threads: int = 0,
) -> list[Damage]:
    """Return everything that is wrong with the checkpoint in `path`; an empty list if it is exactly what was written.

    Manifest and index are always verified. With `files`, only these are verified as well, so that ranks can share the
    work. Without, all files are, and there must be no others. No file is parsed before its checksum is verified.
    `report_progress` is called in this thread as chunks of files have been read. `num_threads` read them; 0: as many as
    are good for one process.
    """
    try:
        step = StepFiles(path)
    except DamagedError as error:
        return list(error.damages)
    except UserError as error:
        return [Damage(MANIFEST, f"cannot be used: {error.what}")]
    records = step.manifest.files
    chosen = [name for name in records if name != INDEX] if files is None else [each for each in files if each != INDEX]
    damages = [Damage(name, "is not in the manifest") for name in chosen if name not in records]
    parts = [(name, records[name], number) for name in chosen if name in records
             for number in range(len(records[name].checksums))]  # fmt: skip
    progress, buffer = ThreadProgress(report_progress), ThreadBuffer()

    def damage_of(part: tuple[str, FileRecord, int]) -> Damage | None:
        name, record, number = part
        try:
            fd = open_regular_fd(path / name)  # one for each part: the kernel reads ahead for each descriptor
            try:
                if (size := os.fstat(fd).st_size) != record.bytes:
                    return Damage(name, f"has {size:,} bytes instead of {record.bytes:,}")
                digest, (begin, end), memory = sha256(), record.range_of(number), buffer.of()
                for at in range(begin, end, len(memory)):
                    chunk = memory[: min(len(memory), end - at)]
                    read_blocks(fd, chunk, at, len(chunk))
                    digest.update(chunk)
                    progress.count()
            finally:
                os.close(fd)
        except FileNotFoundError:
            return Damage(name, "is missing")
        except OSError as error:
            return unreadable(name, error)
        is_right = digest.hexdigest() == record.checksums[number]
        return None if is_right else Damage(name, "is not what was written: its checksum is wrong")

    threads = num_threads or num_io_threads()
    found = map_in_threads(damage_of, parts, num_threads=threads, while_waiting=progress.report)
    damages += {damage.file: damage for damage in reversed(found) if damage}.values()  # the first of each file
    if files is None:
        expected = {*records, MANIFEST}
        damages += [Damage(each, "does not belong here") for each in sorted(os.listdir(path)) if each not in expected]
    return damages


def refuse_damaged_weights(path: Path, *, share: slice = slice(None), num_threads: int = 0) -> None:
    """Raise DamagedError if weights in this rank's `share` of the files differ. Optimizer files are not read."""
    index = StepFiles(path).index
    files = {region.file for key, each in index.items() if key.startswith(WEIGHTS) for region in each.regions}
    if damages := verify(path, files=sorted(files)[share], num_threads=num_threads):
        raise DamagedError(path, damages)


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
            one_is, other_is = (f"{each.dtype} {'x'.join(map(str, each.shape))}" for each in (here, there))
            found.append(TensorDifference(key=key, what=f"is {one_is} and {other_is}"))
        elif difference := _compare(key, ours, theirs):
            found.append(difference)
    return found


def _compare(key: str, ours: StepFiles, theirs: StepFiles) -> TensorDifference | None:
    meta = ours.index[key].meta
    num_different, largest = 0, 0.0
    for region in ours.index[key].regions:
        for other, start, size in overlaps(theirs.index[key].regions, region.start, region.size):
            mine, its = _window(ours, meta, region, start, size), _window(theirs, meta, other, start, size)
            different = (mine != its).any(axis=-1)
            if count := int(different.sum()):
                num_different += count
                largest = max(largest, _distance(mine[different], its[different], meta.dtype))
    if not num_different:
        return None
    distance = largest if meta.dtype in (*NUMPY_DTYPES, "BF16") else None
    return TensorDifference(key=key, what="has different values", num_values=prod(meta.shape),
                            num_different=num_different, largest=distance)  # fmt: skip


def _window(
    files: StepFiles, meta: TensorMeta, region: TensorRegion, start: tuple[int, ...], size: tuple[int, ...]
) -> np.ndarray:
    """Return a part of a region; the last dimension of the array holds the bytes of one value."""
    values = files.bytes_of(meta, region).reshape(*region.size, VALUE_BYTES[meta.dtype])
    return values[window(start, size, region.start)]


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
