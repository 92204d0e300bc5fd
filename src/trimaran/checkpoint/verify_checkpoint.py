"""Verifies that a checkpoint is what was written. Imports no torch."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from trimaran.checkpoint.file_parts import (
    ThreadBuffer,
    ThreadProgress,
    hash_range,
    map_in_threads,
    num_io_threads,
)
from trimaran.checkpoint.manifest import INDEX, MANIFEST, Damage, DamagedError, FileRecord, unreadable
from trimaran.checkpoint.step_files import StepFiles
from trimaran.core import UserError
from trimaran.core.regular_files import open_regular_fd

WEIGHTS = "model/"  # the prefix of their keys
Part = tuple[str, FileRecord, int]
"""The name and record of a file, and the number of the part of it that one checksum covers."""


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
    found = _PartCheck(path, report_progress).run(parts, num_threads or num_io_threads())
    damages += {damage.file: damage for damage in reversed(found) if damage}.values()  # the first of each file
    if files is None:
        expected = {*records, MANIFEST}
        damages += [Damage(each, "does not belong here") for each in sorted(os.listdir(path)) if each not in expected]
    return damages


def refuse_damaged_weights(path: Path, *, share: slice = slice(None), num_threads: int = 0) -> None:
    """Raise DamagedError if weights of the checkpoint in `path` differ from their checksums.

    Files that hold only optimizer states are not read. `share` are the files of this rank, if several share the work.
    """
    index = StepFiles(path).index
    files = {region.file for key, each in index.items() if key.startswith(WEIGHTS) for region in each.regions}
    if damages := verify(path, files=sorted(files)[share], num_threads=num_threads):
        raise DamagedError(path, damages)


class _PartCheck:
    """Compares parts of the files in `folder` with their checksums."""

    def __init__(self, folder: Path, report_progress: Callable[[], None]) -> None:
        self._folder, self._progress, self._buffer = folder, ThreadProgress(report_progress), ThreadBuffer()

    def run(self, parts: list[Part], num_threads: int) -> list[Damage | None]:
        return map_in_threads(self._damage, parts, num_threads=num_threads, while_waiting=self._progress.report)

    def _damage(self, part: Part) -> Damage | None:
        """Return what is wrong with a part of a file."""
        name, record, number = part
        try:
            fd = open_regular_fd(self._folder / name)  # one for each part: the kernel reads ahead for each descriptor
            try:
                if (size := os.fstat(fd).st_size) != record.bytes:
                    return Damage(name, f"has {size:,} bytes instead of {record.bytes:,}")
                checksum = hash_range(fd, *record.range_of(number), self._buffer.memory, self._progress.count)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return Damage(name, "is missing")
        except OSError as error:
            return unreadable(name, error)
        is_right = checksum == record.checksums[number]
        return None if is_right else Damage(name, "is not what was written: its checksum is wrong")
