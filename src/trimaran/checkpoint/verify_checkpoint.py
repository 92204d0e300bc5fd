"""Whether a checkpoint is what was written. No torch in here."""

import os
import stat
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from trimaran.checkpoint.durable import CHUNK_BYTES, OLD
from trimaran.checkpoint.manifest import INDEX, MANIFEST, Damage, DamagedError, FileRecord
from trimaran.checkpoint.step_files import StepFiles
from trimaran.core import UserError


def verify(path: Path, *, files: Iterable[str] | None = None) -> list[Damage]:
    """Return all that is wrong with the checkpoint in `path`; nothing when it is exactly what was written.

    Manifest and index are always looked at. Of the others, only the `files` named, when ranks share the work; else all
    of them, and that there are no others. Nothing is taken for true before its sum was right.
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
        known = {*records, MANIFEST}
        damages += [Damage(each, "does not belong here") for each in sorted(os.listdir(path)) if each not in known]
    return damages


def _damage(folder: Path, name: str, record: FileRecord | None) -> Damage | None:
    """Return what is wrong with one file."""
    if record is None:
        return Damage(name, "is not in the manifest")
    try:
        with os.fdopen(os.open(folder / name, OLD), "rb", buffering=0) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                return Damage(name, "is not a file")
            if about.st_size != record.bytes:
                return Damage(name, f"has {about.st_size:,} bytes instead of {record.bytes:,}")
            total, room = sha256(), memoryview(bytearray(min(CHUNK_BYTES, max(1, record.bytes))))
            while count := file.readinto(room):
                total.update(room[:count])
    except FileNotFoundError:
        return Damage(name, "is missing")
    except OSError as error:
        return Damage(name, f"cannot be read: {error.strerror}")
    return None if total.hexdigest() == record.sha256 else Damage(name, "is not what was written: its sum is wrong")
