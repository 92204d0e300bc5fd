"""Writes, reads and compares the parts of a file in several threads. Imports no torch.

A file of more than `PART_BYTES` has a checksum for each part, so that threads share the work. They write with direct
I/O where the file system has it: straight from the memory of the share to the disk, without a copy in the page cache.
"""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TypeVar

import numpy as np

from trimaran.checkpoint.durable import CHUNK_BYTES, DurableDisk
from trimaran.checkpoint.manifest import FileRecord
from trimaran.core import open_regular_fd

PART_BYTES = 64 << 20
BLOCK_BYTES = 4096  # direct I/O needs offsets, lengths and addresses that are multiples of this
MIN_THREADS, MAX_THREADS = 4, 12
MAX_DIRECT_CALLS = 4
"""How many threads read or write at a time. The others hash: with more calls at once a disk becomes slower."""
POLL_SECONDS = 0.1

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_io_threads(num_processes: int = 1) -> int:
    """Return how many threads read or write files if `num_processes` of this machine do so at once.

    More than there are cores: most of them wait for the disk. With `CHUNK_BYTES` each they bound the memory of a save.
    """
    cores = len(os.sched_getaffinity(0))
    return max(MIN_THREADS, min(MAX_THREADS, cores // num_processes))


def map_in_threads(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    num_threads: int,
    while_waiting: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Return the result of `work` for each item, in order. After an error no item is begun, and the error is raised.

    This thread calls `while_waiting` now and then, and at the end. The threads are daemons, so that a process which
    ends does not wait for them, as it would for those of an executor.
    """
    if num_threads == 1:
        done = []
        for item in items:
            done.append(work(item))
            while_waiting()
        return done
    numbers, results, errors = count(), {}, []

    def run() -> None:
        try:
            while not errors and (number := next(numbers)) < len(items):
                results[number] = work(items[number])
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [
        threading.Thread(target=run, name="trimaran-file", daemon=True) for _ in range(min(num_threads, len(items)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            while_waiting()
    while_waiting()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]


class ThreadProgress:
    """Counts what threads have done, and calls `report_progress` in the thread that waits for them."""

    def __init__(self, report_progress: Callable[[], None]) -> None:
        self._report_progress, self._num_done, self._num_reported = report_progress, 0, 0

    def count(self) -> None:
        self._num_done += 1

    def report(self) -> None:
        """Call `report_progress` if there has been any since the last call."""
        if self._num_done != self._num_reported:
            self._num_reported = self._num_done
            self._report_progress()


class ThreadBuffer(threading.local):
    """Memory for each thread that uses it, aligned for direct I/O."""

    memory = memoryview(b"")

    def of(self, num_bytes: int = CHUNK_BYTES) -> memoryview:
        """Return memory for `num_bytes`, rounded up to whole chunks."""
        rounded = -(-num_bytes // CHUNK_BYTES) * CHUNK_BYTES
        if len(self.memory) < rounded:
            self.memory = memoryview(mmap.mmap(-1, rounded))
        return self.memory[:rounded]


def is_large(num_bytes: int) -> bool:
    """Return whether a file with data of this length is written in parts."""
    return num_bytes > PART_BYTES


def write_content(path: Path, content: Sequence[memoryview], disk: DurableDisk) -> FileRecord:
    """Write a header and data to a new file, read it back, and return its record when it is durable.

    If the data is large, the length of the header must be a multiple of `BLOCK_BYTES`. Raises OSError if the file does
    not have `content`, as far as it is read back (see `_PartFile`), or if `content` changes meanwhile.
    """
    num_bytes = sum(map(len, content))
    fd = disk.create(path)
    try:
        if is_large(len(content[-1])):
            disk.reserve(fd, num_bytes)
            with _PartFile(path, fd, content, disk) as file:
                parts = [(begin, min(num_bytes, begin + PART_BYTES)) for begin in range(0, num_bytes, PART_BYTES)]
                digests = map_in_threads(file.write, parts, num_threads=disk.num_threads)
                if file.needs_sample:
                    map_in_threads(file.sample, parts, num_threads=disk.num_threads)
            disk.sync(fd)
            return FileRecord(num_bytes, part_bytes=PART_BYTES, part_sha256=tuple(digests))
        for _, chunk in _chunks(content, 0, num_bytes):
            disk.write(fd, chunk)
        disk.sync(fd)
    finally:
        os.close(fd)
    fd = open_regular_fd(path)
    try:
        return FileRecord(num_bytes, _read_back(fd, content, (0, num_bytes), ThreadBuffer().of(), disk))
    finally:
        os.close(fd)


def has_content(path: Path, content: Sequence[memoryview], record: FileRecord, disk: DurableDisk) -> bool:
    """Return whether the file has exactly `content`, and the length and checksums of `record`."""
    if record.bytes != sum(map(len, content)):
        return False
    fd, buffer = open_regular_fd(path), ThreadBuffer()
    try:
        checksums = map_in_threads(
            lambda number: _read_back(fd, content, record.range_of(number), buffer.of(), disk),
            range(len(record.checksums)),
            num_threads=disk.num_threads,
        )
        return os.fstat(fd).st_size == record.bytes and tuple(checksums) == record.checksums
    finally:
        os.close(fd)


class _PartFile:
    """A file that threads write part by part. `fd` is open for writing without direct I/O.

    With direct I/O the disk gets the bytes from the memory that is hashed. It is summed again afterwards, so what the
    disk was given is what the checksum says. The first and last block of each write are read back from the disk, which
    finds writes that were lost, cut off or went elsewhere. All is read back, compared and hashed if the disk
    `reads_back_all`, and without direct I/O: then it comes from the page cache.
    """

    def __init__(self, path: Path, fd: int, content: Sequence[memoryview], disk: DurableDisk) -> None:
        self._path, self._fd, self._content, self._disk = path, fd, content, disk
        self._buffer, self._writers = ThreadBuffer(), threading.BoundedSemaphore(MAX_DIRECT_CALLS)
        self._parts_fd, self._is_direct = disk.open_direct(path)

    def __enter__(self) -> "_PartFile":
        try:
            at, chunk = next(_chunks(self._content, 0, BLOCK_BYTES))
            self._write(at, chunk)  # some file systems refuse direct I/O only now
        except OSError as error:
            os.close(self._parts_fd)
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
            self._parts_fd, self._is_direct = self._disk.open_buffered(self._path), False
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._parts_fd)

    def write(self, part: tuple[int, int]) -> str:
        """Write one part, read it back, and return its SHA-256."""
        if self.needs_sample:
            digest, sums = sha256(), []
            for at, chunk in _chunks(self._content, *part):
                digest.update(chunk)
                sums.append(_sum(chunk))
                self._write(at, chunk)
            self._compare([_sum(chunk) for _, chunk in _chunks(self._content, *part)], sums)
            return digest.hexdigest()
        for at, chunk in _chunks(self._content, *part):
            self._write(at, chunk)
        checksum = _read_back(self._parts_fd, self._content, part, self._buffer.of(), self._disk)
        if not self._is_direct:  # start to write it to the disk, and free the page cache once that is done
            os.posix_fadvise(self._parts_fd, part[0], part[1] - part[0], os.POSIX_FADV_DONTNEED)
        return checksum

    @property
    def needs_sample(self) -> bool:
        """Whether `sample` must be called for each part after all are written: `write` does not read them back."""
        return self._is_direct and not self._disk.reads_back_all

    def sample(self, part: tuple[int, int]) -> None:
        """Read back the end of each write of a part and the beginning of the next. Raises OSError if they differ."""
        # This is done after all writes: while they are queued, each read waits long.
        edges = [*(at for at, _ in _chunks(self._content, *part)), part[1] // BLOCK_BYTES * BLOCK_BYTES]
        for at in edges:
            around = max(part[0], at - BLOCK_BYTES), min(part[1], at + BLOCK_BYTES)
            _read_back(self._parts_fd, self._content, around, self._buffer.of(), self._disk)

    def _compare(self, sums: object, before: object) -> None:
        if sums != before:
            raise OSError(errno.EIO, "the memory of the share changed while it was written", str(self._path))

    def _write(self, at: int, chunk: memoryview) -> None:
        whole = len(chunk) // BLOCK_BYTES * BLOCK_BYTES if self._is_direct else 0
        if whole:
            data = chunk[:whole]
            if np.frombuffer(data, np.uint8).ctypes.data % BLOCK_BYTES:
                data = self._buffer.of()[:whole]
                np.copyto(np.frombuffer(data, np.uint8), np.frombuffer(chunk[:whole], np.uint8))
                self._compare(_sum(data), _sum(chunk[:whole]))
            with self._writers:
                self._disk.write_at(self._parts_fd, data, at)
        if whole < len(chunk):  # the end of the file, or a file system without direct I/O
            self._disk.write_at(self._fd, chunk[whole:], at + whole)


def _read_back(
    fd: int, content: Sequence[memoryview], part: tuple[int, int], buffer: memoryview, disk: DurableDisk
) -> str:
    """Return the SHA-256 of a part of a file. Raises OSError if it is not that of `content`."""
    digest = sha256()
    for at, chunk in _chunks(content, *part):
        # Direct I/O reads whole blocks; at the end of the file it returns less.
        disk.read_at(fd, buffer[: -(-len(chunk) // BLOCK_BYTES) * BLOCK_BYTES], at, len(chunk))
        stored = buffer[: len(chunk)]
        # numpy compares words several times as fast as bytes, without the GIL.
        whole = len(chunk) // 8 * 8
        mine, its = (np.frombuffer(each[:whole], np.uint64) for each in (stored, chunk))
        if not np.array_equal(mine, its) or stored[whole:] != chunk[whole:]:
            raise OSError(errno.EIO, f"the file on disk is not what was written, near byte {at:,}")
        digest.update(stored)
    return digest.hexdigest()


def _chunks(content: Sequence[memoryview], begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes `begin` to `end` of `content`, in chunks that are contiguous in memory, with their offsets."""
    start = 0
    for piece in content:
        first, last = max(begin, start), min(end, start + len(piece))
        for at in range(first, last, CHUNK_BYTES):
            yield at, piece[at - start : min(last, at + CHUNK_BYTES) - start]
        start += len(piece)


def _sum(data: memoryview) -> int:
    """Return the sum of the words of `data`: one flipped bit changes it, and it is ten times as fast as a SHA-256."""
    whole = len(data) // 8 * 8
    return int(np.add.reduce(np.frombuffer(data[:whole], np.uint64))) + sum(data[whole:])
