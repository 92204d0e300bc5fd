"""The index of `metrics.jsonl`: for each block of steps, where its lines are and their sums.

Rank 0 extends it while it trains. It is a cache: readers check every line of it by its checksum and against the end of
the block in the metrics, and read the metrics themselves where the index has no block, or a wrong one.
"""

import json
import logging
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

from trimaran.core import PHASES, append_regular_file, open_regular_file
from trimaran.runs.journal import LineFollower, LongLine, last_step
from trimaran.runs.line_files import lines_from_end, next_line
from trimaran.runs.read.step_lines import StepLine, read_step, read_waits
from trimaran.runs.run_directory import RunDirectory

log = logging.getLogger(__name__)


Point = tuple[float, float]
"""A position, such as a step, and a value."""

STEP_CATEGORIES = ("compute", "communication", "data", "straggler", "save")
MAX_NOT_FINITE = 50  # steps with NaN or Inf that a block lists

SCALARS: dict[str, Callable[[StepLine], float]] = {
    "loss": lambda step: step.loss,
    "grad_norm": lambda step: step.grad_norm,
    "lr": lambda step: step.lr,
    "tokens_per_second": lambda step: step.tokens_per_second if step.step_seconds > 0 else math.nan,
    "step_seconds": lambda step: step.step_seconds,
    "peak_bytes": lambda step: float(step.peak_bytes),
}
BLOCK_LINES = 256
MAX_BLOCKS_AT_ONCE = 4  # written by one call, so that a long file without an index does not stop the training
CHECKED_BYTES = 4096  # at the end of a block: the last line and its time, also if it has all details


class Extent(NamedTuple):
    """The finite values of a scalar over some steps: their number and sum, and four of the points."""

    count: int
    total: float
    first: Point
    last: Point
    least: Point
    most: Point


def join_extents(extents: Sequence[Extent]) -> Extent:
    """Return the extent of all `extents`, which are in order; there is at least one."""
    if len(extents) == 1:
        return extents[0]
    least, most = min([each.least[1] for each in extents]), max([each.most[1] for each in extents])
    return Extent(
        sum([each.count for each in extents]),
        math.fsum([each.total for each in extents]),
        extents[0].first,
        extents[-1].last,
        next(each.least for each in extents if each.least[1] == least),
        next(each.most for each in extents if each.most[1] == most),
    )


def extent_of(points: Sequence[Point]) -> Extent | None:
    """Return the extent of points in order; None if none is finite."""
    finite = [point for point in points if -math.inf < point[1] < math.inf]
    if not finite:
        return None
    values = [value for _, value in finite]
    least, most = values.index(min(values)), values.index(max(values))
    return Extent(len(finite), math.fsum(values), finite[0], finite[-1], finite[least], finite[most])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlock:
    """The sums of `count` steps, from step `first` to step `last`.

    `seconds` are those of `STEP_CATEGORIES` over the steps with finite times, of which `highest` is the highest step
    and `time` the latest time. `phases` are sums of seconds. `scalars` has the extent of each of `SCALARS`.
    """

    first: int
    last: int
    count: int
    highest: int
    time: float
    seconds: tuple[float, ...]
    phases: dict[str, float]
    scalars: dict[str, Extent]
    not_finite: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the block as JSON for `read_block`."""
        extents = {name: [each.count, each.total, *each.first, *each.last, *each.least, *each.most]
                   for name, each in self.scalars.items()}  # fmt: skip
        return {
            "steps": [self.first, self.last, self.count, self.highest],
            "time": self.time,
            "seconds": [round(each, 6) for each in self.seconds],
            "phases": [round(self.phases.get(name, 0.0), 6) for name in PHASES],
            "scalars": extents,
            "not_finite": list(self.not_finite),
        }

    def join(self, later: Self) -> "StepBlock":
        """Return the block of these steps and the `later` ones."""
        scalars = dict(self.scalars)
        for name, extent in later.scalars.items():
            scalars[name] = join_extents([scalars[name], extent]) if name in scalars else extent
        return StepBlock(
            first=self.first,
            last=later.last,
            count=self.count + later.count,
            highest=max(self.highest, later.highest),
            time=max(self.time, later.time),
            seconds=tuple(mine + theirs for mine, theirs in zip(self.seconds, later.seconds, strict=True)),
            phases={name: self.phases.get(name, 0.0) + later.phases.get(name, 0.0) for name in PHASES},
            scalars=scalars,
            not_finite=(*self.not_finite, *later.not_finite)[:MAX_NOT_FINITE],
        )


def block_of(steps: Sequence[StepLine]) -> StepBlock:
    """Return the block of `steps`, of which there is at least one."""
    splits = [(step, split_step(step)) for step in steps]
    timed = [(step, parts) for step, parts in splits if math.isfinite(sum(parts))]
    return StepBlock(
        first=steps[0].step,
        last=steps[-1].step,
        count=len(steps),
        highest=max((step.step for step, _ in timed), default=0),
        time=max((step.time for step, _ in timed), default=0.0),
        seconds=tuple(math.fsum(parts[index] for _, parts in timed) for index in range(len(STEP_CATEGORIES))),
        phases={name: math.fsum(step.phases.get(name, 0.0) for step in steps) for name in PHASES},
        scalars={
            name: extent
            for name, value in SCALARS.items()
            if (extent := extent_of([(step.step, value(step)) for step in steps])) is not None
        },
        not_finite=tuple(each.step for each in steps if not_finite(each))[:MAX_NOT_FINITE],
    )


def estimated_block(sample: Sequence[StepLine], last: int) -> StepBlock:
    """Return the block of the steps from the first of `sample` to `last`, with sums as if all were like the sample."""
    found = block_of(sample)
    count = max(found.count, last - found.first + 1)
    factor = count / found.count
    return replace(
        found,
        last=max(last, found.last),
        count=count,
        highest=max(last, found.highest),
        seconds=tuple(factor * each for each in found.seconds),
        phases={name: factor * each for name, each in found.phases.items()},
        scalars={
            name: each._replace(count=round(factor * each.count), total=factor * each.total)
            for name, each in found.scalars.items()
        },
    )


def read_block(tree: Mapping[str, Any]) -> StepBlock:
    """Return the block of `StepBlock.as_dict`. Raises KeyError, ValueError or TypeError if it is of another version."""
    first, last, count, highest = tree["steps"]
    scalars = {
        name: Extent(finite, total, (a, first_value), (b, last_value), (c, least), (d, most))
        for name, (finite, total, a, first_value, b, last_value, c, least, d, most) in tree["scalars"].items()
    }
    seconds = tuple(tree["seconds"])
    if len(seconds) != len(STEP_CATEGORIES) or not scalars.keys() <= SCALARS.keys():
        raise ValueError("not the sums of this version")
    return StepBlock(
        first=first,
        last=last,
        count=count,
        highest=highest,
        time=tree["time"],
        seconds=seconds,
        phases=dict(zip(PHASES, tree["phases"], strict=True)),
        scalars=scalars,
        not_finite=tuple(tree["not_finite"]),
    )


def not_finite(step: StepLine) -> bool:
    """Whether the loss or the gradient norm of a step is NaN or Inf."""
    return not (math.isfinite(step.loss) and math.isfinite(step.grad_norm))


def split_step(step: StepLine) -> tuple[float, float, float, float, float]:
    """Return the seconds of a step in the order of `STEP_CATEGORIES`; they add up to `step_seconds`."""
    phases, total = step.phases, step.step_seconds
    if not total > 0:
        total = sum(phases.values())
    data, save = phases.get("data", 0.0), phases.get("checkpoint", 0.0)
    left = max(0.0, total - data - save)
    comm, straggler = read_waits(step.rest)
    straggler = min(left, straggler)
    # A rank waits for others inside a collective, in whichever phase that is.
    communication = min(left, max(phases.get("comm", 0.0), comm + straggler)) - straggler
    return left - straggler - communication, communication, data, straggler, save


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
        """Note a new line of metrics; extend the index every `BLOCK_LINES`. Never raises: the index only saves time."""
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
            begin, indexed = 0, 0
            for offset, line in lines_from_end(self._index):
                if line.endswith(b"\n") and (block := _parse(line, metrics.fileno())) is not None:
                    begin, indexed = block.end, offset + len(line)
                    break
            # Cut off the blocks at the end whose lines were withdrawn.
            if self._index.exists() and indexed < self._index.stat().st_size:
                os.truncate(self._index, indexed)
            metrics.seek(begin)
            added = []
            for _ in range(max_blocks):
                lines = [next_line(metrics) for _ in range(BLOCK_LINES)]
                if not lines[-1][0].endswith(b"\n"):
                    break
                end = begin + sum(size for _, size in lines)
                if steps := [step for line, _ in lines if (step := read_step(line)) is not None]:
                    place = {"begin": begin, "end": end, "check": _check(metrics.fileno(), begin, end)}
                    body = json.dumps(place | block_of(steps).as_dict(), separators=(",", ":")).encode()
                    added.append(b"%08x %s\n" % (zlib.crc32(body), body))
                begin = end
        if added:
            with append_regular_file(self._index) as index:
                index.write(b"".join(added))
        return len(added)


class IndexFollower:
    """Yields the valid blocks added to an index since the last call, in order, disjoint, from the byte `after` on."""

    def __init__(self, metrics: Path, index: Path, *, after: int = 0) -> None:
        self._metrics, self._lines, self._end = metrics, LineFollower(index), after

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
    """Yield the valid blocks of an index, see `IndexFollower`."""
    return IndexFollower(metrics, index, after=after).new()


def _parse(line: bytes, metrics: int) -> IndexedBlock | None:
    """Return the block of a line; None if it is damaged or not made of these metrics, whose descriptor is `metrics`."""
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
    return zlib.crc32(os.pread(metrics, min(CHECKED_BYTES, end - begin), max(begin, end - CHECKED_BYTES)))


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
        self, run: RunDirectory, num_lines: int, *, max_unindexed_bytes: int = MAX_UNINDEXED_BYTES, limits: ReadLimits
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
            with open_regular_file(self._run.metrics) as metrics:
                yield from self._past(metrics, is_wanted)
        yield from filter(None, map(read_step, self._lines.new()))

    def _past(self, metrics: BinaryIO, is_wanted: Callable[[StepBlock], bool]) -> Iterator[StepLine | StepBlock]:
        """Yield the steps of the index, and those after it up to the last ones."""
        first_line = last_step(self._run) - self._num_lines
        for block in read_index(self._run.metrics, self._run.metrics_index, after=self._lines.offset):
            is_whole = block.begin > 0 and block.steps.last <= first_line and is_wanted(block.steps)
            yield from self._between(metrics, self._lines.offset, block.begin if is_whole else block.end)
            if is_whole:
                yield block.steps
            self._lines.skip_to(block.end)
        last_begin, num_bytes, num_lines = self._lines.offset, 0, 0
        for offset, line in lines_from_end(self._run.metrics):
            if offset <= self._lines.offset or (num_bytes >= self._limits.last_bytes and num_lines >= self._num_lines):
                break
            last_begin, num_bytes, num_lines = offset, num_bytes + len(line), num_lines + 1
        yield from self._between(metrics, self._lines.offset, last_begin)
        self._lines.skip_to(last_begin)

    def _between(self, metrics: BinaryIO, begin: int, end: int) -> Iterator[StepLine | StepBlock]:
        """Yield the steps in a range of bytes; estimated blocks if there are more than are read line by line."""
        limits = self._limits
        if end - begin <= limits.lines_bytes:
            yield from _lines_between(metrics, begin, end)
            return
        if begin == 0:
            rest = os.pread(metrics.fileno(), PLACE_BYTES, limits.first_bytes).partition(b"\n")[0]  # of a line
            first_end = limits.first_bytes + len(rest) + 1
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
    lines = os.pread(metrics.fileno(), PLACE_BYTES, place).split(b"\n")[0 if is_begin else 1 : -1]
    steps = [step for line in lines if (step := read_step(line + b"\n")) is not None]
    return steps[:PLACE_LINES]
