"""Any range of a run's steps in a bounded time: sums of 256, 1,024, 4,096 … steps with minimum and maximum.

The lowest level is the index that rank 0 writes beside the metrics (`runs/read/step_index.py`); each level above joins
four blocks of the one below. A short range is read line by line, a long one from the level that has enough blocks.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from trimaran.app import StepHistory
from trimaran.core import open_regular_file
from trimaran.runs import IndexedBlock, IndexFollower, RunDirectory, StepBlock, StepLine, next_line, read_step

FANOUT = 4  # blocks that are joined to one of the level above
MAX_SINGLE_STEPS = 4096  # of a range that is read line by line: about 2 MB
MIN_BLOCKS = 300  # of a level that is used for a range, if a lower one has more
MAX_UNINDEXED_BYTES = 16 << 20  # that are read after the index, or without one


class StepPyramid:
    """The levels of one run. `refresh` reads the blocks that were appended to the index."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._index = run, IndexFollower(run.metrics, run.metrics_index)
        self._blocks: list[IndexedBlock] = []
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._levels: list[list[StepBlock]] = [[]]

    @property
    def levels(self) -> list[int]:
        return [len(level) for level in self._levels]

    def refresh(self) -> None:
        for block in self._index.new():
            self._blocks.append(block)
            self._firsts.append(block.steps.first)
            self._lasts.append(block.steps.last)
            self._add(block.steps, level=0)

    def _add(self, block: StepBlock, *, level: int) -> None:
        if level == len(self._levels):
            self._levels.append([])
        found = self._levels[level]
        found.append(block)
        if len(found) % FANOUT == 0:
            joined = found[-FANOUT]
            for each in found[-FANOUT + 1 :]:
                joined = joined.join(each)
            self._add(joined, level=level + 1)

    def history(self, first: int, last: int) -> StepHistory:
        """Return the steps from `first` to `last`: single ones of a short range, else blocks with exact ends."""
        history = StepHistory()
        begin, end = bisect_left(self._lasts, first), bisect_right(self._firsts, last)
        if last - first < MAX_SINGLE_STEPS or end - begin < 3:
            for step in self._lines(self._start(begin), self._stop(end), first, last):
                history.add(step)
            return history
        inner_begin = begin + (self._firsts[begin] < first)
        inner_end = end - (self._lasts[end - 1] > last)
        for step in self._lines(self._start(begin), self._start(inner_begin), first, last):
            history.add(step)
        for block in self._between(inner_begin, inner_end):
            history.add_block(block)
        for step in self._lines(self._start(inner_end), self._stop(end), first, last):
            history.add(step)
        return history

    def _start(self, block: int) -> int:
        """Return where the lines of a block begin, or those after the last one."""
        if block < len(self._blocks):
            return self._blocks[block].begin
        return self._blocks[-1].end if self._blocks else 0

    def _stop(self, block: int) -> int | None:
        """Return where the lines before a block end; None is the end of the file, within bounds."""
        return self._blocks[block - 1].end if 0 < block < len(self._blocks) else None

    def _between(self, begin: int, end: int) -> Iterator[StepBlock]:
        """Yield the blocks [begin, end) of the index, joined where a level has still enough of them."""
        level = 0
        while level + 1 < len(self._levels) and (end - begin) // FANOUT ** (level + 1) >= MIN_BLOCKS:
            level += 1
        width = FANOUT**level
        while begin < end:
            if begin % width == 0 and begin + width <= end and begin // width < len(self._levels[level]):
                yield self._levels[level][begin // width]
                begin += width
            else:
                yield self._levels[0][begin]
                begin += 1

    def _lines(self, begin: int, stop: int | None, first: int, last: int) -> Iterator[StepLine]:
        stop = begin + MAX_UNINDEXED_BYTES if stop is None else stop
        try:
            with open_regular_file(self._run.metrics) as metrics:
                metrics.seek(begin)
                while begin < stop:
                    line, size = next_line(metrics)
                    begin += size
                    if not size:
                        return
                    if line.endswith(b"\n") and (step := read_step(line)) is not None:
                        if step.step > last:
                            return
                        if step.step >= first:
                            yield step
        except FileNotFoundError:
            return
