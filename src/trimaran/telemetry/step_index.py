"""The index of `metrics.jsonl`: for each block of steps, where its lines are and their sums.

Rank 0 extends it while it trains. It is a cache: readers check every line of it by its checksum and against the end of
the block in the metrics, and read the metrics themselves where the index has no block, or a wrong one.
"""

import json
import logging
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.core.regular_files import append_regular_file, open_regular_file
from trimaran.run.journal import LineFollower
from trimaran.run.lines_from_end import lines_from_end, next_line
from trimaran.telemetry.step_blocks import StepBlock, block_of, read_block
from trimaran.telemetry.step_lines import read_step

log = logging.getLogger(__name__)

BLOCK_LINES = 256
MAX_BLOCKS_AT_ONCE = 4  # written by one call, so that a long file without an index does not stop the training
CHECKED_BYTES = 4096  # at the end of a block: the last line and its time, also if it has all details


@dataclass(frozen=True, slots=True)
class IndexedBlock:
    """A block, and the range of bytes in `metrics.jsonl` with its lines."""

    begin: int
    end: int
    steps: StepBlock


class StepIndexer:
    """Extends the index of one `metrics.jsonl`. Only rank 0, which writes the metrics, may have one.

    Metrics are only ever appended, or truncated to repeat steps. So if the end of a block is as it was, the block is.
    """

    def __init__(self, metrics: Path, index: Path) -> None:
        self._metrics, self._index = metrics, index
        self._num_new_lines = 0
        self._has_failed = False

    def note_line(self) -> None:
        """Note that a line was appended to the metrics; every `BLOCK_LINES` of them the index is extended.

        It never raises: without an index everything is the same, but slower to show.
        """
        self._num_new_lines += 1
        if self._num_new_lines < BLOCK_LINES:
            return
        self._num_new_lines = 0
        try:
            self.extend()
        except OSError as error:
            if not self._has_failed:
                log.warning("%s cannot be written: %s", self._index.name, error.strerror)
            self._has_failed = True

    def extend(self, max_blocks: int = MAX_BLOCKS_AT_ONCE) -> int:
        """Write the next blocks, at most `max_blocks`; return how many."""
        with open_regular_file(self._metrics) as metrics:
            begin = self._drop_stale(metrics.fileno())
            metrics.seek(begin)
            added = []
            for _ in range(max_blocks):
                lines = [next_line(metrics) for _ in range(BLOCK_LINES)]
                if not lines[-1][0].endswith(b"\n"):
                    break
                end = begin + sum(size for _, size in lines)
                if steps := [step for line, _ in lines if (step := read_step(line)) is not None]:
                    place = {"begin": begin, "end": end, "check": _check(metrics.fileno(), begin, end)}
                    added.append(_index_line(place | block_of(steps).as_dict()))
                begin = end
        if added:
            with append_regular_file(self._index) as index:
                index.write(b"".join(added))
        return len(added)

    def _drop_stale(self, metrics: int) -> int:
        """Cut off the blocks at the end of the index whose lines were withdrawn; return where the next block begins."""
        for offset, line in lines_from_end(self._index):
            if line.endswith(b"\n") and (block := _parse(line, metrics)) is not None:
                if offset + len(line) < self._index.stat().st_size:
                    os.truncate(self._index, offset + len(line))
                return block.end
        if self._index.exists():
            os.truncate(self._index, 0)
        return 0


class IndexFollower:
    """Yields the valid blocks that were added to an index since the last call; they do not overlap."""

    def __init__(self, metrics: Path, index: Path) -> None:
        self._metrics, self._lines, self._end = metrics, LineFollower(index), 0

    def new(self) -> Iterator[IndexedBlock]:
        try:
            with open_regular_file(self._metrics) as metrics:
                for line in self._lines.new():
                    block = _parse(line, metrics.fileno())
                    if block is not None and block.begin >= self._end:
                        self._end = block.end
                        yield block
        except FileNotFoundError:
            return


def read_index(metrics: Path, index: Path, *, after: int = 0) -> Iterator[IndexedBlock]:
    """Yield the valid blocks of an index in order, from the byte `after` of the metrics on; they do not overlap."""
    try:
        with open_regular_file(index) as lines, open_regular_file(metrics) as file:
            while line := next_line(lines)[0]:
                block = _parse(line, file.fileno())
                if block is not None and block.begin >= after:
                    yield block
                    after = block.end
    except FileNotFoundError:
        return


def _parse(line: bytes, metrics: int) -> IndexedBlock | None:
    """Return the block of a line of the index; None if it is damaged, or if the metrics are not those it was made of.

    `metrics` is the descriptor of the metrics file.
    """
    head, _, body = line.removesuffix(b"\n").partition(b" ")
    if head != b"%08x" % zlib.crc32(body):
        return None
    try:
        tree = json.loads(body)
        begin, end = tree["begin"], tree["end"]
        return IndexedBlock(begin, end, read_block(tree)) if _check(metrics, begin, end) == tree["check"] else None
    except (LookupError, ValueError, TypeError, OSError):  # of another version
        return None


def _check(metrics: int, begin: int, end: int) -> int:
    """Return the checksum of the end of a block."""
    return zlib.crc32(os.pread(metrics, min(CHECKED_BYTES, end - begin), max(begin, end - CHECKED_BYTES)))


def _index_line(tree: dict[str, Any]) -> bytes:
    """Return a line of the index: the checksum of its JSON, and the JSON."""
    body = json.dumps(tree, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)
