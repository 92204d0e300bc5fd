"""Reads a file of lines from its end, so that the cost does not grow with the length of the file."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

from trimaran.core.regular_files import open_regular_fd

BLOCK_BYTES = 1 << 15


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) from the last line of a file to its first. Only the last line may lack its newline.

    A missing file has no lines.
    """
    try:
        fd = open_regular_fd(path)
    except FileNotFoundError:
        return
    try:
        end, rest, block_bytes = os.fstat(fd).st_size, b"", BLOCK_BYTES
        while end > 0:
            begin = max(0, end - block_bytes)
            lines = io.BytesIO(os.pread(fd, end - begin, begin) + rest).readlines()  # `splitlines` cuts at \r too
            # The first line may begin before the block. If it is the only one, the next block is larger.
            first = 0 if begin == 0 else 1
            block_bytes = BLOCK_BYTES if len(lines) > 1 else 2 * block_bytes
            offset = begin + sum(map(len, lines))
            for line in reversed(lines[first:]):
                offset -= len(line)
                yield offset, line
            end, rest = begin, b"".join(lines[:first])
    finally:
        os.close(fd)


def last_lines(path: Path, count: int) -> list[bytes]:
    """Return the last `count` complete lines of a file, the oldest first."""
    found: list[bytes] = []
    for _, line in lines_from_end(path):
        if len(found) == count:
            break
        if line.endswith(b"\n"):
            found.append(line)
    return found[::-1]
