"""Reads the steps of a run: new ones line by line, a long past as blocks of the index, or of estimates without one."""

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import BinaryIO, NamedTuple

from trimaran.core.regular_files import open_regular_file
from trimaran.runs.journal import LineFollower, LongLine, last_step
from trimaran.runs.line_files import lines_from_end, next_line
from trimaran.runs.read.step_index import StepBlock, estimated_block, read_index
from trimaran.runs.read.step_lines import StepLine, read_step
from trimaran.runs.run_directory import RunDirectory

MAX_UNINDEXED_BYTES = 16 << 20  # up to this much, about 35,000 steps, the index is not used
PLACE_BYTES = 1 << 15
PLACE_LINES = 6


class ReadLimits(NamedTuple):
    """What is read of steps that the index lacks: up to `lines_bytes` line by line.

    Of more, the first steps are read, the last ones, and some at many places in between.
    """

    lines_bytes: int = 16 << 20
    first_bytes: int = 1 << 18
    last_bytes: int = 4 << 20
    num_places: int = 1000


READ_LIMITS = ReadLimits()


class StepReader:
    """Yields the steps that were added to the metrics of a run since the last call.

    The first block and the last `num_lines` steps are always read line by line. `num_estimated` is the number of steps
    that were not read, because the index lacks them and they are too many: their blocks are estimates.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        num_lines: int,
        max_unindexed_bytes: int = MAX_UNINDEXED_BYTES,
        limits: ReadLimits = READ_LIMITS,
    ) -> None:
        self._run, self._num_lines, self._max_unindexed_bytes = run, num_lines, max_unindexed_bytes
        self._limits = limits
        self._lines = LineFollower(run.metrics)
        self.num_estimated = 0

    @property
    def long_lines(self) -> list[LongLine]:
        """The lines that were skipped because they are too long."""
        return self._lines.long_lines

    def new(self, is_wanted: Callable[[StepBlock], bool]) -> Iterator[StepLine | StepBlock]:
        """Yield the new steps in order. A block for which `is_wanted` is false is read line by line."""
        try:
            size = self._run.metrics.stat().st_size
        except FileNotFoundError:
            return
        if size - self._lines.scanned > self._max_unindexed_bytes:
            yield from self._indexed(is_wanted)
            yield from self._before_the_last()
        yield from filter(None, map(read_step, self._lines.new()))

    def _indexed(self, is_wanted: Callable[[StepBlock], bool]) -> Iterator[StepLine | StepBlock]:
        """Yield the steps up to the last block of the index."""
        first_line = last_step(self._run) - self._num_lines
        with open_regular_file(self._run.metrics) as metrics:
            for block in read_index(self._run.metrics, self._run.metrics_index, after=self._lines.offset):
                is_whole = block.begin > 0 and block.steps.last <= first_line and is_wanted(block.steps)
                yield from self._between(metrics, self._lines.offset, block.begin if is_whole else block.end)
                if is_whole:
                    yield block.steps
                self._lines.skip_to(block.end)

    def _before_the_last(self) -> Iterator[StepLine | StepBlock]:
        """Yield the steps after the index, up to the last ones."""
        last_begin, num_bytes, num_lines = self._lines.offset, 0, 0
        for offset, line in lines_from_end(self._run.metrics):
            if offset <= self._lines.offset or (num_bytes >= self._limits.last_bytes and num_lines >= self._num_lines):
                break
            last_begin, num_bytes, num_lines = offset, num_bytes + len(line), num_lines + 1
        with open_regular_file(self._run.metrics) as metrics:
            yield from self._between(metrics, self._lines.offset, last_begin)
        self._lines.skip_to(last_begin)

    def _between(self, metrics: BinaryIO, begin: int, end: int) -> Iterator[StepLine | StepBlock]:
        """Yield the steps in a range of bytes; estimated blocks if there are more than are read line by line."""
        limits = self._limits
        if end - begin <= limits.lines_bytes:
            yield from _lines_between(metrics, begin, end)
            return
        if begin == 0:
            first_end = limits.first_bytes + len(_bytes_at(metrics, limits.first_bytes).partition(b"\n")[0]) + 1
            yield from _lines_between(metrics, begin, first_end)
            begin = first_end
        places = [begin + number * (end - begin) // limits.num_places for number in range(limits.num_places)]
        samples = [_steps_at(metrics, place, is_begin=place == begin) for place in places]
        samples = [*filter(None, samples), _steps_at(metrics, end, is_begin=True)]
        for sample, following in pairwise(samples):
            last = following[0].step - 1 if following else sample[-1].step
            if last < sample[0].step:
                continue  # a damaged place
            block = estimated_block(sample, last)
            self.num_estimated += block.count - len(sample)
            yield block


def _lines_between(metrics: BinaryIO, begin: int, end: int) -> Iterator[StepLine]:
    """Yield the steps of the lines in a range of bytes."""
    metrics.seek(begin)
    while begin < end:
        line, size = next_line(metrics)
        if not size:
            return
        begin += size
        if (step := read_step(line)) is not None:
            yield step


def _steps_at(metrics: BinaryIO, place: int, *, is_begin: bool) -> list[StepLine]:
    """Return some neighbouring steps at a place in the metrics. `is_begin`: a line begins there."""
    lines = _bytes_at(metrics, place).split(b"\n")[0 if is_begin else 1 : -1]
    steps = [step for line in lines if (step := read_step(line + b"\n")) is not None]
    return steps[:PLACE_LINES]


def _bytes_at(metrics: BinaryIO, place: int) -> bytes:
    return os.pread(metrics.fileno(), PLACE_BYTES, place)
