"""Verifies that a checkpoint is what was written. Imports no torch."""

import os
import stat
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from trimaran.checkpoint.durable import CHUNK_BYTES, READ_FLAGS
from trimaran.checkpoint.manifest import INDEX, MANIFEST, Damage, DamagedError, FileRecord
from trimaran.checkpoint.step_files import StepFiles
from trimaran.core import UserError


def verify(path: Path, *, files: Iterable[str] | None = None) -> list[Damage]:
    """Return everything that is wrong with the checkpoint in `path`; an empty list if it is exactly what was written.

    Manifest and index are always verified. With `files`, only these are verified as well, so that ranks can share the
    work. Without, all files are, and there must be no others. No file is parsed before its checksum is verified.
    """
    try:
        step = StepFiles(path)
    except DamagedError as error:
        return list(error.damages)
    except UserError as error:
        return [Damage(MANIFEST, f"cannot be used: {error.what}")]
    records = step.manifest.files
    chosen = [name for name in records if name != INDEX] if files is None else [each for each in files if each != INDEX]
    damages = [damage for name in chosen if (damage := _damage(path, name, records.get(name)))]
    if files is None:
        expected = {*records, MANIFEST}
        damages += [Damage(each, "does not belong here") for each in sorted(os.listdir(path)) if each not in expected]
    return damages


def _damage(folder: Path, name: str, record: FileRecord | None) -> Damage | None:
    """Return what is wrong with one file."""
    if record is None:
        return Damage(name, "is not in the manifest")
    try:
        with os.fdopen(os.open(folder / name, READ_FLAGS), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return Damage(name, "is not a file")
            if status.st_size != record.bytes:
                return Damage(name, f"has {status.st_size:,} bytes instead of {record.bytes:,}")
            digest, buffer = sha256(), memoryview(bytearray(min(CHUNK_BYTES, max(1, record.bytes))))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except FileNotFoundError:
        return Damage(name, "is missing")
    except OSError as error:
        return Damage(name, f"cannot be read: {error.strerror}")
    return (
        None if digest.hexdigest() == record.sha256 else Damage(name, "is not what was written: its checksum is wrong")
    )
