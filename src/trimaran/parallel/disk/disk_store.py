"""Tensors in a file on a local disk, read and written past the page cache.

The file has no name: the kernel removes it when the process ends, however it ends. So nothing can resume from it, and a
crash in the middle of an update leaves nothing behind that could be mistaken for a state. Checkpoints are copies.
"""

import errno
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from trimaran.core import Bytes
from trimaran.parallel.disk.tensors_on_disk import STORES
from trimaran.runs.disk_folder import no_room

ALIGNMENT = 4096  # of addresses, file offsets and sizes: what direct I/O needs on every disk
NUM_THREADS = 16  # requests of a rank at a time: a disk needs many for its full bandwidth
MAX_REQUEST_BYTES = 8 << 20
NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)


class FileMapping(mmap.mmap):
    """The mapping of a whole file, and its store."""

    store: "DiskStore"


class DiskStore:
    """A file of `num_bytes` whose parts are tensors.

    A tensor of `allocate` is a mapping of its part of the file. Whoever reads or writes it as a tensor goes through the
    page cache, which the kernel keeps consistent with the direct reads and writes of `read` and `write`, as long as the
    two do not overlap in time. Training uses the latter, and everything else (initial weights, checkpoints) the former.
    """

    def __init__(self, folder: Path, num_bytes: int, *, write_at: Callable[..., int] = os.pwritev) -> None:
        self._size, self._write_at = max(ALIGNMENT, num_bytes), write_at
        self._descriptor, self.is_direct = _open_unnamed(folder)
        try:
            os.posix_fallocate(self._descriptor, 0, self._size)
        except OSError as error:
            os.close(self._descriptor)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise no_room(str(folder), Bytes(num_bytes), Bytes(shutil.disk_usage(folder).free)) from None
        self._map = FileMapping(self._descriptor, self._size)
        self._map.store = self  # lives as long as its tensors, which refer to the mapping
        self._start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._used = 0
        self._pool = _pool_of(os.getpid())
        STORES.add(self)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor of zeros in the file."""
        start, count = self._used, prod(shape)
        self._used += padded(count * dtype.itemsize)
        assert self._used <= self._size, "the store is too small for its tensors"
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(*shape)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor, or what it is a view of, is in this file."""
        return tensor.is_cpu and 0 <= tensor.data_ptr() - self._start < self._size

    def read(self, source: Tensor, target: Tensor, after: Sequence[object] = ()) -> list[Future[None]]:
        """Start to read a tensor of this store into the bytes of `target`, after these futures and CUDA events."""
        return [
            self._pool.submit(self._transfer, os.preadv, offset, part, after) for offset, part in _parts(
                self._offset(source), target[: padded(source.nbytes)])
        ]  # fmt: skip

    def write(self, target: Tensor, source: Tensor, after: object = None) -> list[Future[None]]:
        """Start to write the bytes of `source` to a tensor of this store, once the CUDA event `after` has happened."""
        return [
            self._pool.submit(self._transfer, self._write_at, offset, part, () if after is None else (after,))
            for offset, part in _parts(self._offset(target), source[: padded(target.nbytes)])
        ]

    def release(self) -> None:
        """Write back what was written to the tensors as such, and free the memory that their pages take."""
        self._map.flush()
        self._map.madvise(mmap.MADV_DONTNEED)
        with suppress(OSError):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _offset(self, tensor: Tensor) -> int:
        offset = tensor.data_ptr() - self._start
        assert tensor.is_contiguous(), "only whole blocks are read and written"
        assert offset % ALIGNMENT == 0, "only whole blocks are read and written"
        return offset

    def _transfer(self, move: object, offset: int, part: Tensor, after: Sequence[object]) -> None:
        """Read or write all bytes of `part`. What it waits for was started before it, so that the pool never stops."""
        for each in after:
            each.result() if isinstance(each, Future) else each.synchronize()  # pyrefly: ignore[missing-attribute]
        view, done = part.numpy().data, 0
        while done < len(view):
            moved = move(self._descriptor, [view[done:]], offset + done)  # pyrefly: ignore[not-callable]
            if not moved:
                raise OSError(errno.EIO, "the file for offloaded tensors is shorter than it was")
            done += moved

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            os.close(self._descriptor)


@cache
def _pool_of(process: int) -> ThreadPoolExecutor:
    """Return the threads that all stores of a process share. A forked process does not inherit its parent's."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="trimaran-disk")


def padded(num_bytes: int) -> int:
    """Return the bytes that a tensor takes in the file."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(num_bytes: int, *, pinned: bool) -> Tensor:
    """Return host memory for direct I/O, as bytes."""
    memory = torch.empty(padded(num_bytes) + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + padded(num_bytes)]


def _parts(offset: int, memory: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the requests of one transfer: the place in the file, and the memory."""
    for start in range(0, len(memory), MAX_REQUEST_BYTES):
        yield offset + start, memory[start : start + MAX_REQUEST_BYTES]


def _open_unnamed(folder: Path) -> tuple[int, bool]:
    """Return a descriptor of a new file without a name, and whether it bypasses the page cache."""
    flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_DIRECT, mode=0o600), True
    except OSError as error:
        if error.errno not in NO_DIRECT_IO:
            raise
    return os.open(folder, flags, mode=0o600), False
