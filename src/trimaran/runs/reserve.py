"""The reserve of a run: a preallocated file that is given up piece by piece when the disk is full.

Incidents, events and attempts can so be written to a run directory on a full disk. Every process of the run may release
a piece. The supervisor and rank 0 take pieces back.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

RESERVE_BYTES = 4 << 20  # one block of 4 KiB for the last lines of each of 1,000 ranks
PIECE_BYTES = 16 << 10  # released at a time, so that other processes cannot fill all of it at once
SPARE_BYTES = 1 << 20  # more than this must be free before pieces are taken back
LOCK_SECONDS = 0.5  # how long to wait for another process; releasing without the lock is harmless
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
# What a file system says about all of its files.
DISK_REASONS = tuple(os.strerror(each) for each in (*DISK_FULL_ERRORS, errno.EROFS, errno.EIO, errno.ESTALE))
NO_ALLOCATION_ERRORS = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # of file systems such as ZFS

T = TypeVar("T")


def write_with_reserve(reserve: Path | None, write: Callable[[], T]) -> T:
    """Return `write()`. While it raises because the disk is full, release pieces of the reserve and call it again."""
    try:
        return write()
    except OSError as error:
        if reserve is None or error.errno not in DISK_FULL_ERRORS:
            raise
        full = error
    with _open_locked(reserve) as fd:
        while fd is not None:
            try:
                return write()  # first: another process may have made room while this one waited for the lock
            except OSError as error:
                if error.errno not in DISK_FULL_ERRORS or not (size := os.fstat(fd).st_size):
                    raise
            os.ftruncate(fd, max(0, size - PIECE_BYTES))
    raise full


def fill_reserve(reserve: Path, *, allocate: Callable[[int, int, int], None] = os.posix_fallocate) -> bool:
    """Allocate what is missing of the reserve if the disk has room for it, and return whether it is complete."""
    try:
        missing = RESERVE_BYTES - (reserve.stat().st_size if reserve.exists() else 0)
        if missing <= 0:
            return True
        usage = os.statvfs(reserve.parent)
        if usage.f_blocks and usage.f_bavail * usage.f_frsize < missing + SPARE_BYTES:
            return False
        with _open_locked(reserve, os.O_CREAT) as fd:
            return fd is not None and _allocate(fd, allocate)
    except OSError:
        return False  # a run works without its reserve


def remove_reserve(reserve: Path) -> None:
    """Delete the reserve: a run that is over needs none."""
    with contextlib.suppress(OSError):
        reserve.unlink()


def _allocate(fd: int, allocate: Callable[[int, int, int], None]) -> bool:
    size = os.fstat(fd).st_size
    try:
        try:
            allocate(fd, 0, RESERVE_BYTES)
        except OSError as error:
            if error.errno not in NO_ALLOCATION_ERRORS:
                raise
            os.pwrite(fd, os.urandom(RESERVE_BYTES), 0)  # bytes that a file system cannot compress
    except OSError:
        os.ftruncate(fd, size)  # a failed call may leave a part of it
    return os.fstat(fd).st_size == RESERVE_BYTES


@contextlib.contextmanager
def _open_locked(reserve: Path, flags: int = 0) -> Iterator[int | None]:
    """Open the reserve for writing, locked if no other process keeps the lock; None if there is no reserve."""
    try:
        fd = os.open(reserve, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | flags, 0o600)
    except OSError:
        yield None
        return
    try:
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(0.01)
                    continue
            except OSError:
                pass  # this file system has no locks
            break
        yield fd
    finally:
        os.close(fd)
