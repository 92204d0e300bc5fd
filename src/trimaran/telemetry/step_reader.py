"""Reads the steps of a run: new ones line by line, and a long past as blocks of the index."""

from collections.abc import Callable, Iterator
from typing import BinaryIO

from trimaran.core.regular_files import open_regular_file
from trimaran.run.journal import LineFollower, last_step
from trimaran.run.run_directory import RunDirectory
from trimaran.telemetry.step_blocks import StepBlock
from trimaran.telemetry.step_index import read_index
from trimaran.telemetry.step_lines import StepLine, read_step

MAX_UNINDEXED_BYTES = 16 << 20  # up to this much, about 35,000 steps, every line is read


class StepReader:
    """Yields the steps that were added to the metrics of a run since the last call.

    The first block and the last `num_lines` steps are always read line by line.
    """

    def __init__(self, run: RunDirectory, *, num_lines: int, max_unindexed_bytes: int = MAX_UNINDEXED_BYTES) -> None:
        self._run, self._num_lines, self._max_unindexed_bytes = run, num_lines, max_unindexed_bytes
        self._lines = LineFollower(run.metrics)

    def new(self, is_wanted: Callable[[StepBlock], bool]) -> Iterator[StepLine | StepBlock]:
        """Yield the new steps in order. A block for which `is_wanted` is false is read line by line."""
        try:
            size = self._run.metrics.stat().st_size
        except FileNotFoundError:
            return
        if size - self._lines.offset > self._max_unindexed_bytes:
            yield from self._indexed(is_wanted)
        yield from filter(None, map(read_step, self._lines.new()))

    def _indexed(self, is_wanted: Callable[[StepBlock], bool]) -> Iterator[StepLine | StepBlock]:
        """Yield the steps up to the last block of the index."""
        first_line = last_step(self._run) - self._num_lines
        with open_regular_file(self._run.metrics) as metrics:
            for block in read_index(self._run.metrics, self._run.metrics_index, after=self._lines.offset):
                is_whole = block.begin > 0 and block.steps.last <= first_line and is_wanted(block.steps)
                yield from _lines_between(metrics, self._lines.offset, block.begin if is_whole else block.end)
                if is_whole:
                    yield block.steps
                self._lines.skip_to(block.end)


def _lines_between(metrics: BinaryIO, begin: int, end: int) -> Iterator[StepLine]:
    """Yield the steps of the lines in a range of bytes."""
    metrics.seek(begin)
    while begin < end and (line := metrics.readline()):
        begin += len(line)
        if (step := read_step(line)) is not None:
            yield step
