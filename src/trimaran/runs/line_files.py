"""Appends JSON lines to a file of a run: each line is written whole or not at all.

A process may be killed, and a disk may fill up, in the middle of a line. What was written of it is cut off again.

Readers take bounded memory: a line too long to be one of ours is damaged, and is skipped. From the end, the cost does
not grow with the length of the file.
"""

import errno
import io
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trimaran.core import open_regular_fd
from trimaran.runs.record_types import finite_values
from trimaran.runs.reserve import write_with_reserve
from trimaran.runs.run_directory import show_paths

log = logging.getLogger(__name__)

# Errors after which lines are kept and written later: the disk is full, broken, read-only, or the folder is gone.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOENT, errno.ENOTDIR}
RETRY_SECONDS = 1.0  # between attempts to write lines that are kept
KEPT_BYTES = 1 << 20
BATCH_BYTES = 1 << 16  # written at a time
SEARCH_BYTES = 1 << 12
ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
BLOCK_BYTES = 1 << 15
SKIPPED_BYTES = 1 << 20  # of a long line, in memory at once
MAX_LINE_BYTES = 16 << 20


@dataclass(slots=True)
class LostLines:
    """Lines that were never written: how many, and the steps of the first and the last."""

    count: int = 0
    first_step: int = 0
    last_step: int = 0

    def add(self, step: int) -> None:
        self.first_step = self.first_step if self.count else step
        self.count, self.last_step = self.count + 1, step


class LineWriter:
    """Appends JSON lines to a file that no other process writes at the same time.

    If they cannot be written, lines are kept in memory and written in order by a later call; `failure` says why.
    Beyond `max_kept_bytes` the oldest are lost and counted in `lost`. With `reserve`, a full disk first gets room from
    that file, see `reserve.py`.
    """

    def __init__(
        self,
        path: Path,
        *,
        reserve: Path | None = None,
        max_kept_bytes: int = KEPT_BYTES,
        clock: Callable[[], float] = time.monotonic,
        write_to: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._write_to = write_to
        self.path, self._reserve, self._max_kept_bytes, self._clock = path, reserve, max_kept_bytes, clock
        self.failure = ""
        self.lost = LostLines()
        self._kept: deque[tuple[bytes, int]] = deque()  # lines and their steps
        self._kept_bytes = 0
        self._retry_at = 0.0
        self._fd: int | None = None
        self._may_be_torn = True  # the file may end with a part of a line

    def write(self, record: dict[str, Any]) -> None:
        """Append `record`, or keep it for later. Raises only for errors that are not those of a disk."""
        line = show_paths(_line(record), self.path, in_json=True).encode()
        step = record.get("step")
        self._kept.append((line, step if isinstance(step, int) else 0))
        self._kept_bytes += len(line)
        self.flush(at_once=self._reserve is not None)

    def flush(self, *, at_once: bool = True) -> bool:
        """Write the kept lines, and return whether none is left. Without `at_once`, at most once a second."""
        if self._kept and (at_once or not self.failure or self._clock() >= self._retry_at):
            try:
                write_with_reserve(self._reserve, self._write_kept)
            except OSError as error:
                if error.errno not in DISK_ERRORS:
                    raise
                why = error.strerror or str(error)
                if not self.failure:
                    log.warning("%s cannot be written: %s; new lines are kept in memory", self.path.name, why)
                self.failure, self._retry_at = why, self._clock() + RETRY_SECONDS
                self.close()  # a stale descriptor of a network disk never works again
            else:
                self.failure = ""
        while self._kept_bytes > self._max_kept_bytes:
            self.lost.add(self._pop())
        return not self._kept

    def close(self) -> None:
        """Close the file. Lines that are kept stay; the next call opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def forget_after(self, step: int) -> None:
        """Drop the kept lines of steps after `step`, which are repeated."""
        self._kept = deque(each for each in self._kept if each[1] <= step)
        self._kept_bytes = sum(len(line) for line, _ in self._kept)

    def lose_kept(self) -> None:
        """Count the kept lines as lost: the process ends."""
        while self._kept:
            self.lost.add(self._pop())

    def _write_kept(self) -> None:
        if self._fd is None:
            self.path.parent.mkdir(exist_ok=True)
            self._fd = open_regular_fd(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode=0o644)
            self._may_be_torn = True
        if self._may_be_torn:
            _cut_torn_line(self._fd)
        self._may_be_torn = True
        while self._kept:
            lines, num_bytes = [], 0
            for line, _ in self._kept:
                if lines and num_bytes + len(line) > BATCH_BYTES:
                    break
                lines.append(line)
                num_bytes += len(line)
            data, written = b"".join(lines), 0
            try:
                while written < len(data):
                    written += self._write_to(self._fd, data[written:])
            finally:  # if the disk is full in the middle of a line, cut off what was written of it
                whole = data.rfind(b"\n", 0, written) + 1
                for _ in range(data.count(b"\n", 0, whole)):
                    self._pop()
                if whole < written:
                    _cut_torn_line(self._fd)
        self._may_be_torn = False

    def _pop(self) -> int:
        line, step = self._kept.popleft()
        self._kept_bytes -= len(line)
        return step


def append_line(path: Path, record: dict[str, Any], *, reserve: Path | None = None) -> None:
    """Append `record` to the JSON lines at `path`. If the disk is full or broken, it is lost with a warning."""
    writer = LineWriter(path, reserve=reserve)
    try:
        writer.write(record)
    finally:
        writer.close()


def _cut_torn_line(fd: int) -> None:
    """Cut off what follows the last complete line: a part of a line that a killed process left."""
    end = size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) == b"\n":
        return
    while end > 0:
        start = max(0, end - SEARCH_BYTES)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0 or start == 0:
            whole = start + found + 1
            if whole < size:
                os.ftruncate(fd, whole)
            return
        end = start


def _line(record: dict[str, Any]) -> str:
    """Return `record` as one line of strict JSON. NaN and Inf become null, which every reader can parse."""
    try:
        return ENCODER.encode(record) + "\n"
    except ValueError:  # a number is NaN or Inf
        return ENCODER.encode(finite_values(record)) + "\n"


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
