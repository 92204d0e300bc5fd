"""Verifies that a checkpoint is what was written. Imports no torch."""

import os
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

from trimaran.checkpoint.durable import CHUNK_BYTES
from trimaran.checkpoint.manifest import INDEX, MANIFEST, Damage, DamagedError, FileRecord, unreadable
from trimaran.checkpoint.step_files import StepFiles
from trimaran.core import UserError
from trimaran.core.regular_files import open_regular_file


def verify(
    path: Path, *, files: Iterable[str] | None = None, report_progress: Callable[[], None] = lambda: None
) -> list[Damage]:
    """Return everything that is wrong with the checkpoint in `path`; an empty list if it is exactly what was written.

    Manifest and index are always verified. With `files`, only these are verified as well, so that ranks can share the
    work. Without, all files are, and there must be no others. No file is parsed before its checksum is verified.
    `report_progress` is called after each chunk of a file.
    """
    try:
        step = StepFiles(path)
    except DamagedError as error:
        return list(error.damages)
    except UserError as error:
        return [Damage(MANIFEST, f"cannot be used: {error.what}")]
    records = step.manifest.files
    chosen = [name for name in records if name != INDEX] if files is None else [each for each in files if each != INDEX]
    damages = [damage for name in chosen if (damage := _damage(path, name, records.get(name), report_progress))]
    if files is None:
        expected = {*records, MANIFEST}
        damages += [Damage(each, "does not belong here") for each in sorted(os.listdir(path)) if each not in expected]
    return damages


def _damage(folder: Path, name: str, record: FileRecord | None, report_progress: Callable[[], None]) -> Damage | None:
    """Return what is wrong with one file."""
    if record is None:
        return Damage(name, "is not in the manifest")
    try:
        with open_regular_file(folder / name) as file:
            if (size := os.fstat(file.fileno()).st_size) != record.bytes:
                return Damage(name, f"has {size:,} bytes instead of {record.bytes:,}")
            digest, buffer = sha256(), memoryview(bytearray(min(CHUNK_BYTES, max(1, record.bytes))))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                report_progress()
    except FileNotFoundError:
        return Damage(name, "is missing")
    except OSError as error:
        return unreadable(name, error)
    return (
        None if digest.hexdigest() == record.sha256 else Damage(name, "is not what was written: its checksum is wrong")
    )
