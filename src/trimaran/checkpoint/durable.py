"""The file system calls of a checkpoint, in one class, with the syncs that make it durable. Imports no torch."""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimaran.core import UserError, show_bytes

CHUNK_BYTES = 8 << 20
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
UPDATE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class DurableDisk:
    """The calls that write a checkpoint. Tests replace it with one that fails at a chosen call."""

    num_threads = 4  # how many threads write a large file
    reads_back_all = False  # whether every byte of a large file is read back, or the first and last block of each write
    num_pieces = 0
    """How many chunks were written and read back and files synced: the progress of a save. Threads may miss some."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Return the descriptor of a new file; an existing one is an OSError."""
        return os.open(path, CREATE_FLAGS, 0o644)

    def write(self, fd: int, data: memoryview) -> None:
        while data:
            data = data[os.write(fd, data) :]
            self.num_pieces += 1

    def reserve(self, fd: int, num_bytes: int) -> None:
        """Allocate a new file, so that a full disk is an OSError now, and threads can write to it at once."""
        # On a file system that cannot, `os.posix_fallocate` would write to every block: minutes for a large file.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) != 0:
            number = ctypes.get_errno()
            if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise OSError(number, os.strerror(number))
            os.ftruncate(fd, num_bytes)

    def open_direct(self, path: Path) -> tuple[int, bool]:
        """Return a descriptor to update a file without the page cache, and True; one with it, and False, without."""
        try:
            return os.open(path, UPDATE_FLAGS | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self.open_buffered(path), False

    def open_buffered(self, path: Path) -> int:
        """Return a descriptor to update a file."""
        return os.open(path, UPDATE_FLAGS)

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        while data:
            num_bytes = os.pwrite(fd, data, offset)
            data, offset = data[num_bytes:], offset + num_bytes
            self.num_pieces += 1

    def read_at(self, fd: int, buffer: memoryview, offset: int, num_bytes: int) -> None:
        """Fill the first `num_bytes` of `buffer`. The others may be overwritten: direct I/O reads whole blocks."""
        read_blocks(fd, buffer, offset, num_bytes)
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


def read_blocks(fd: int, buffer: memoryview, offset: int, num_bytes: int) -> None:
    """Fill the first `num_bytes` of `buffer`, at least. An end of the file before that is an OSError."""
    num_read = 0
    while num_read < num_bytes:
        more = os.preadv(fd, [buffer[num_read:]], offset + num_read)
        if not more:
            raise OSError(errno.EIO, f"it ends at byte {offset + num_read:,}")
        num_read += more


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
        existing = path.absolute()
        while not existing.exists():
            existing = existing.parent
        usage, mount = shutil.disk_usage(existing), existing.resolve()  # the path may begin with a descriptor
        while not mount.is_mount():
            mount = mount.parent
        where = f"{error.filename or path} (disk {mount}: {show_bytes(usage.free)} of {show_bytes(usage.total)} free)"
        raise UserError("K006.checkpoint-cannot-written", where=where, reason=error.strerror or error) from error
