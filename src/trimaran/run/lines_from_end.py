"""Reads files of lines in bounded memory: a line too long to be one of ours is damaged, and is skipped.

From the end, the cost does not grow with the length of the file.
"""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trimaran.core.regular_files import open_regular_fd

BLOCK_BYTES = 1 << 15
SKIPPED_BYTES = 1 << 20  # of a long line, in memory at once
MAX_LINE_BYTES = 16 << 20


def next_line(file: BinaryIO, known_bytes: int = 0) -> tuple[bytes, int]:
    """Return the next line and its size in bytes.

    A line of more than `MAX_LINE_BYTES` is returned as its newline alone, or as nothing if it has none yet. If
    `known_bytes` of it were read before, `file` is after them.
    """
    line = b"" if known_bytes else file.readline(MAX_LINE_BYTES + 1)
    size = known_bytes + len(line)
    if size <= MAX_LINE_BYTES:
        return line, size
    if line.endswith(b"\n"):
        return b"\n", size
    while part := file.read(SKIPPED_BYTES):  # much faster than parts of lines
        if (end := part.find(b"\n") + 1) > 0:
            file.seek(end - len(part), os.SEEK_CUR)
            return b"\n", size + end
        size += len(part)
    return b"", size


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) from the last line of a file to its first. Only the last line may lack its newline.

    A missing file has no lines. A line that does not fit `MAX_LINE_BYTES` is yielded as its newline, or as nothing.
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
            if len(rest) > MAX_LINE_BYTES:
                end, block_bytes = _begin_of_line(fd, begin), BLOCK_BYTES
                yield end, b"\n" if rest.endswith(b"\n") else b""
                rest = b""
    finally:
        os.close(fd)


def _begin_of_line(fd: int, end: int) -> int:
    """Return where the line begins that has the byte before `end`."""
    while end > 0:
        begin = max(0, end - SKIPPED_BYTES)
        if (found := os.pread(fd, end - begin, begin).rfind(b"\n")) >= 0:
            return begin + found + 1
        end = begin
    return 0


def last_lines(path: Path, count: int) -> list[bytes]:
    """Return the last `count` complete lines of a file, the oldest first."""
    found: list[bytes] = []
    for _, line in lines_from_end(path):
        if len(found) == count:
            break
        if line.endswith(b"\n"):
            found.append(line)
    return found[::-1]
