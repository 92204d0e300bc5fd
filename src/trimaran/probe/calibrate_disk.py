"""Measures how fast a local disk reads and writes large files, past the page cache."""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

NUM_THREADS = 16  # as many requests at a time as `parallel/memory/disk_store.py` makes
REQUEST_BYTES = 8 << 20
FILE_BYTES = 1 << 30
MIN_PASSES = 2  # the first one also allocates the blocks of the file, so it is not counted


def measure_disk(folder: Path, *, seconds: float) -> dict[str, float]:
    """Return the bytes that the disk of `folder` reads and writes in a second, in 1e9, in about `seconds`.

    `both` is how many it reads, and writes, while half of the requests are reads and half are writes.

    Each pass goes over a file without a name, which ends with this function. A filesystem without direct I/O is
    measured through the page cache.
    """
    flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
    try:
        descriptor = os.open(folder, flags | os.O_DIRECT, mode=0o600)
    except OSError:
        descriptor = os.open(folder, flags, mode=0o600)
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            write = _rate(pool, partial(_move, (os.pwritev,), descriptor), seconds / 3)
            read = _rate(pool, partial(_move, (os.preadv,), descriptor), seconds / 3)
            both = _rate(pool, partial(_move, (os.preadv, os.pwritev), descriptor), seconds / 3)
    finally:
        os.close(descriptor)
    return {f"{way}_gb_per_second": rate / 1e9 for way, rate in (("read", read), ("write", write), ("both", both))}


def _rate(pool: ThreadPoolExecutor, move: partial[None], seconds: float) -> float:
    """Return the bytes a second of whole passes over the file, without the first."""
    offsets = range(0, FILE_BYTES, REQUEST_BYTES)
    list(pool.map(move, offsets))
    began, passes = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or passes < MIN_PASSES - 1:
        list(pool.map(move, offsets))
        passes += 1
    return passes * FILE_BYTES / (time.perf_counter() - began)


def _move(calls: Sequence[Callable[..., int]], descriptor: int, offset: int) -> None:
    """Make each call for these bytes of the file. Threads are at different calls at any time."""
    buffer = mmap.mmap(-1, REQUEST_BYTES)  # a whole number of pages
    buffer[:8] = offset.to_bytes(8, "little")
    for call in calls:
        done = 0
        while done < REQUEST_BYTES:
            done += call(descriptor, [memoryview(buffer)[done:]], offset + done)
