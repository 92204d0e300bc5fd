"""Everything that changes a disk, call by call, so that what is said to be kept is kept. No torch in here."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimaran.core import UserError, show_bytes

CHUNK_BYTES = 8 << 20
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class DurableDisk:
    """The calls with which a checkpoint is written. Tests put one in its place that breaks at a chosen call."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Return the descriptor of a file that was not there before."""
        return os.open(path, NEW, 0o644)

    def write(self, fd: int, data: memoryview) -> None:
        while data:
            data = data[os.write(fd, data) :]

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        """Return when the names in the folder are on the disk itself."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new, follow_symlinks=False)

    def rename(self, old: Path, new: Path) -> None:
        """Give a folder another name. One that is there already, and not empty, is an OSError."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()


DISK = DurableDisk()


def write_file(path: Path, data: memoryview, disk: DurableDisk) -> None:
    """Write a small file; it is on the disk itself when this returns."""
    fd = disk.create(path)
    try:
        disk.write(fd, data)
        disk.sync(fd)
    finally:
        os.close(fd)


def remove_tree(folder: Path, disk: DurableDisk) -> None:
    """Remove a folder and what is in it. A link in it is removed, never followed."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path, disk)
        else:
            disk.remove(path)
    disk.remove_folder(folder)


@contextmanager
def naming_the_disk(path: Path) -> Iterator[None]:
    """Turn the system's refusal into a UserError that says which disk it was and how much room it has."""
    try:
        yield
    except OSError as error:
        what = f"the checkpoint cannot be written: {error.strerror or error}"
        raise UserError("K006", what, where=f"{error.filename or path} ({_room(path)})",
                        fix="make room there, or keep fewer: --set checkpoint.keep=1") from error  # fmt: skip


def _room(path: Path) -> str:
    """Return the disk that `path` is on, or would be, and its room."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    while not place.is_mount():
        place = place.parent
    return f"disk {place}: {show_bytes(usage.free)} of {show_bytes(usage.total)} free"
