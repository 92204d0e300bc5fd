"""Measures how fast a local disk reads and writes large files, past the page cache."""

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

NUM_THREADS = 16  # as many requests at a time as `parallel/disk_store.py` makes
REQUEST_BYTES = 8 << 20
FILE_BYTES = 1 << 30


def measure_disk(folder: Path, *, seconds: float) -> dict[str, float]:
    """Return the bytes that the disk of `folder` reads and writes in a second, in 1e9, in about `seconds`.

    `both` is how many it reads, and writes, while half of the requests are reads and half are writes.

    The file has no name and ends with this function. A filesystem without direct I/O is measured through the page
    cache. The first pass over the file also allocates its blocks, so it is not counted.
    """
    flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
    try:
        descriptor = os.open(folder, flags | os.O_DIRECT, mode=0o600)
    except OSError:
        descriptor = os.open(folder, flags, mode=0o600)
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
        offsets, half = range(0, FILE_BYTES, REQUEST_BYTES), FILE_BYTES // 2
        one_way = {call: [(call, offset) for offset in offsets] for call in (os.pwritev, os.preadv)}
        # As in an update, which reads some chunks while it writes others.
        mixed = [(call, offset + part) for offset in range(0, half, REQUEST_BYTES)
                 for call, part in ((os.preadv, 0), (os.pwritev, half))]  # fmt: skip
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            write, read, both = (
                _rate(pool, requests, descriptor, seconds / 3) for requests in (*one_way.values(), mixed)
            )
    finally:
        os.close(descriptor)
    return {f"{way}_gb_per_second": rate / 1e9 for way, rate in (("read", read), ("write", write), ("both", both / 2))}


def _rate(
    pool: ThreadPoolExecutor, requests: Sequence[tuple[Callable[..., int], int]], descriptor: int, seconds: float
) -> float:
    """Return the bytes a second of these requests, made again and again for so long, after a pass that is not counted.

    Each thread makes its next request at once, as in an update: none waits for the others.
    """
    list(pool.map(partial(_move, descriptor), requests))
    following = itertools.cycle(requests)  # a thread at a time takes one: it is a single call of C
    began = time.perf_counter()

    def make_requests(_: int) -> int:
        count = 0
        while not count or time.perf_counter() - began < seconds:
            _move(descriptor, next(following))
            count += 1
        return count

    count = sum(pool.map(make_requests, range(NUM_THREADS)))
    return count * REQUEST_BYTES / (time.perf_counter() - began)


BUFFERS = threading.local()


def _move(descriptor: int, request: tuple[Callable[..., int], int]) -> None:
    """Make one request from the memory of this thread, which is used again: new pages would take as long as a disk."""
    (call, offset), done = request, 0
    if not hasattr(BUFFERS, "memory"):
        BUFFERS.memory = mmap.mmap(-1, REQUEST_BYTES)  # a whole number of pages
        BUFFERS.memory[:] = os.urandom(REQUEST_BYTES)  # not zeros, which a virtual disk may not store
    while done < REQUEST_BYTES:
        done += call(descriptor, [memoryview(BUFFERS.memory)[done:]], offset + done)
