"""Fills a file system to its last byte, and frees it again, also if this process is killed."""

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimaran.core import Bytes, UserError, show_bytes

BLOCK_BYTES = 4096
MAX_FILL_BYTES = Bytes(64 << 30)  # a file system with more free space is probably shared with others
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def refuse_shared_disk(folder: Path, *, allow_root: bool, max_bytes: Bytes = MAX_FILL_BYTES) -> None:
    """Raise if the file system of `folder` must not be filled: it is that of the system, or very large."""
    status = os.statvfs(folder)
    free = Bytes(status.f_bavail * status.f_frsize)
    small = "put the run directory on a small file system of its own, such as a tmpfs: --run-dir DIR"
    if free > max_bytes:
        what = f"the disk has {show_bytes(free)} free, and a drill fills at most {show_bytes(max_bytes)}"
        raise UserError("S033", what, where=str(folder), fix=small)
    if folder.stat().st_dev == Path("/").stat().st_dev and not allow_root:
        raise UserError("S033", "the run directory is on the disk of the system: other programs would fail too",
                        where=str(folder), fix=f"{small}; or add --yes")  # fmt: skip


@contextmanager
def filled_disk(folder: Path) -> Iterator[Bytes]:
    """Fill the file system of `folder`, and yield the number of bytes.

    The file has no name, so that the kernel frees it with this process, however that ends.
    """
    fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    try:
        yield _fill(fd)
    finally:
        os.close(fd)


def _fill(fd: int) -> Bytes:
    status = os.fstatvfs(fd)
    size, part = 0, status.f_bfree * status.f_frsize
    while part >= BLOCK_BYTES:
        try:
            os.posix_fallocate(fd, size, part)
            size += part
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                raise
            part //= 2
    os.lseek(fd, size, os.SEEK_SET)
    with contextlib.suppress(OSError):
        while True:
            size += os.write(fd, bytes(BLOCK_BYTES))
    return Bytes(size)
