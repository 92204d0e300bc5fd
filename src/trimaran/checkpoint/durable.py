"""The file system calls of a checkpoint, in one class, with the syncs that make it durable. Imports no torch."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimaran.core import UserError, show_bytes

CHUNK_BYTES = 8 << 20
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DurableDisk:
    """The calls that write a checkpoint. Tests replace it with one that fails at a chosen call."""

    num_pieces = 0
    """How many chunks were written and files synced: the progress of a save."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Return the descriptor of a new file; an existing one is an OSError."""
        return os.open(path, CREATE_FLAGS, 0o644)

    def write(self, fd: int, data: memoryview) -> None:
        while data:
            data = data[os.write(fd, data) :]
            self.num_pieces += 1

    def sync(self, fd: int) -> None:
        os.fsync(fd)
        self.num_pieces += 1

    def sync_folder(self, path: Path) -> None:
        """Return when the names in the folder are durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new, follow_symlinks=False)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a folder. A target that exists and is not empty is an OSError."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()


DISK = DurableDisk()


def write_file(path: Path, data: memoryview, disk: DurableDisk) -> None:
    """Write a small file and return when it is durable."""
    fd = disk.create(path)
    try:
        disk.write(fd, data)
        disk.sync(fd)
    finally:
        os.close(fd)


def remove_tree(folder: Path, disk: DurableDisk) -> None:
    """Remove a folder and its contents. Symbolic links are removed, not followed."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path, disk)
        else:
            disk.remove(path)
    disk.remove_folder(folder)


@contextmanager
def report_disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a UserError that names the disk and its free space."""
    try:
        yield
    except OSError as error:
        what = f"the checkpoint cannot be written: {error.strerror or error}"
        raise UserError("K006", what, where=f"{error.filename or path} ({_free_space(path)})",
                        fix="free space there, or keep fewer: --set checkpoint.keep=1") from error  # fmt: skip


def _free_space(path: Path) -> str:
    """Return the disk that `path` is on, or would be, and its free space."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    usage = shutil.disk_usage(existing)
    mount = existing.resolve()  # the path may begin with a descriptor of the run directory
    while not mount.is_mount():
        mount = mount.parent
    return f"disk {mount}: {show_bytes(usage.free)} of {show_bytes(usage.total)} free"
