"""The lines that a run writes: events and metrics, written by one process and followed by others.

Every line is complete, see `line_files.py`; readers skip one that is not.
"""

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from trimaran.core import Event, EventKind, StepMetrics, append_regular_file, open_regular_file
from trimaran.runs.line_files import MAX_LINE_BYTES, RETRY_SECONDS, LineWriter, LostLines, lines_from_end, next_line
from trimaran.runs.record_types import checked_record
from trimaran.runs.reserve import fill_reserve
from trimaran.runs.run_directory import RunDirectory

METRICS_KEPT_BYTES = 4 << 20  # lines of about 8,000 steps, kept in memory while the disk is full
MAX_UNWRITTEN_STEPS = 1  # metrics of a step are written one step later, so a killed rank may not have written its last


class Journal:
    """The open files of one rank: its events and, on rank 0, the metrics.

    A `disk` event is written when metrics cannot be written and are kept in memory, and another one when they can be
    again. Events may use the run's reserve.
    """

    def __init__(self, run: RunDirectory, rank: int, *, attempt: int = 0, first_rank: int = 0) -> None:
        """`first_rank` is that of an elastic replica: its ranks count from 0, but name their events as the run does."""
        self.rank, self.attempt, self._run, self._first_rank = rank - first_rank, attempt, run, first_rank
        self._events = LineWriter(run.events(rank), reserve=run.reserve)
        writes = rank == first_rank
        self._metrics = LineWriter(run.metrics, max_kept_bytes=METRICS_KEPT_BYTES) if writes else None
        self._held: list[StepMetrics] | None = None  # lines that are not written yet, if lines are to be held
        if writes:
            with contextlib.suppress(OSError):  # a run has this file from its start; a full disk is reported later
                append_regular_file(run.metrics).close()
        self._failure = ""  # why metrics could not be written, as the last `disk` event says
        self._room_due = 0.0

    def event(self, kind: EventKind, *, step: int = 0, **data: Any) -> None:
        rank = self._first_rank + self.rank
        record = Event(kind=kind, rank=rank, time=time.time(), step=step, attempt=self.attempt, data=data)
        self._events.write(record.as_dict())

    def step(self, metrics: StepMetrics) -> None:
        """Write one line of `metrics.jsonl`. Ranks other than 0 write nothing."""
        self._events.flush(at_once=False)
        if self._held is not None:
            self._held.append(metrics)
        elif self._metrics is not None:
            self.write_line(metrics)

    def hold_lines(self) -> list[StepMetrics]:
        """Write no lines from now on; return those that were held since the last call."""
        held, self._held = self._held or [], []
        return held

    @property
    def held(self) -> Sequence[StepMetrics]:
        """The lines that are held."""
        return self._held or ()

    def write_line(self, metrics: StepMetrics) -> None:
        """Write a line that was held. Only the replica whose turn it is does so."""
        if (lines := self._metrics) is None:
            return
        lines.write(metrics.as_dict())
        if lines.failure and not self._failure:
            self._failure = lines.failure
            self.event("disk", step=metrics.step, file=lines.path.name, failed=lines.failure)
        elif self._failure and not lines.failure and time.monotonic() >= self._room_due:
            # There must be room for the reserve, too: what could be written before came from it.
            self._room_due = time.monotonic() + RETRY_SECONDS
            if not self._run.reserve.exists() or fill_reserve(self._run.reserve):
                self._report_room(lines, metrics.step)

    def resume(self, step: int) -> None:
        """Delete the metrics of all steps after `step`, which are repeated. A `replay` event records their cost."""
        if self._metrics is None:
            return
        self._metrics.forget_after(step)
        lost = forget_steps_after(step, self._metrics.path) if self._metrics.path.exists() else []
        if lost:
            self.event("replay", step=step, steps=len(lost), seconds=sum(lost))
        written = last_step(self._run)
        if 0 < written < step - MAX_UNWRITTEN_STEPS and not self._metrics.num_kept:
            missing = {"lost": step - written, "first_lost": written + 1, "last_lost": step}
            self.event("disk", step=step, file=self._metrics.path.name, **missing)

    def _report_room(self, metrics: LineWriter, step: int) -> None:
        missing, metrics.lost, self._failure = metrics.lost, LostLines(), ""
        self.event("disk", step=step, file=metrics.path.name, **_fields(missing))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if (metrics := self._metrics) is not None:
            if not metrics.flush():
                metrics.lose_kept()
                self.event("disk", file=metrics.path.name, failed=metrics.failure, **_fields(metrics.lost))
            elif self._failure:
                self._report_room(metrics, 0)
            metrics.close()
        self._events.flush()
        self._events.close()


def _fields(lost: LostLines) -> dict[str, int]:
    """Return the fields of a `disk` event about lost metrics; none if none were lost."""
    return {"lost": lost.count, "first_lost": lost.first_step, "last_lost": lost.last_step} if lost.count else {}


class LongLine(NamedTuple):
    """A line that is longer than any of ours, and was skipped as damaged: its file, where it begins, and its size."""

    file: str
    offset: int
    num_bytes: int


class LineFollower:
    """Yields complete lines added since the last call; the first goes back at most `backlog` bytes (None: all)."""

    def __init__(self, path: Path, *, backlog: int | None = None) -> None:
        self._path = path
        # Where the next line begins.
        self.offset = 0 if backlog is None or not path.exists() else max(0, path.stat().st_size - backlog)
        self._scanned = 0  # bytes of a line that is too long, and has no end yet
        self._long_lines: list[LongLine] = []

    def skip_to(self, offset: int) -> None:
        """Continue at `offset`, where a line begins."""
        self.offset, self._scanned = offset, 0

    @property
    def scanned(self) -> int:
        """The position in the file: the start of a line, or inside a line that is too long."""
        return self.offset + self._scanned

    @property
    def long_lines(self) -> list[LongLine]:
        """The lines that were skipped because they are too long to be read."""
        last = [LongLine(self._path.name, self.offset, self._scanned)] if self._scanned else []
        return [*self._long_lines, *last]

    def new(self) -> Iterator[bytes]:
        try:
            status = self._path.lstat()
            if status.st_size == self.scanned and stat.S_ISREG(status.st_mode):
                return  # many files are polled many times a second, and few have grown
        except (FileNotFoundError, NotADirectoryError):
            return
        with open_regular_file(self._path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < self.scanned:  # `Journal.resume` may shorten the file
                self.offset, self._scanned = min(self.offset, size), 0
                self._long_lines = [each for each in self._long_lines if each.offset < size]
            file.seek(self.scanned)
            while True:
                line, size = next_line(file, self._scanned)
                self._scanned = size if size > MAX_LINE_BYTES else 0
                if not line.endswith(b"\n"):
                    return
                begin, self.offset, self._scanned = self.offset, self.offset + size, 0
                if size > MAX_LINE_BYTES:
                    self._long_lines.append(LongLine(self._path.name, begin, size))
                else:
                    yield line


def read_lines(path: Path, *, backlog: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file, or of its last `backlog` bytes. A missing file has none."""
    return LineFollower(path, backlog=backlog).new()


def read_json_lines(path: Path, *, backlog: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, or of its last `backlog` bytes; see `parse_lines`."""
    return parse_lines(read_lines(path, backlog=backlog))


def parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the records of `lines`, and skip lines that are not a JSON object or whose fields have wrong types."""
    for line in lines:
        try:
            record = checked_record(json.loads(line, parse_constant=lambda _: None))  # NaN, as `LineWriter` writes it
        except (ValueError, RecursionError):
            continue
        if record is not None:
            yield record


def last_step(run: RunDirectory) -> int:
    """Return the last step that the run has metrics for; 0 if there is none. Only the end of the file is read."""
    for _, line in lines_from_end(run.metrics):
        if line.endswith(b"\n") and (step := _step_of(line)) is not None:
            return step[0]
    return 0


def forget_steps_after(step: int, path: Path) -> list[float]:
    """Truncate the metrics at `path` after the last line of a step up to `step`; return the lost steps' seconds.

    Steps are in order, so only the end of the file is read: a start costs the same after a million steps.
    """
    keep, lost = os.path.getsize(path), []
    for offset, line in lines_from_end(path):
        found = _step_of(line)
        if found is not None and line.endswith(b"\n") and found[0] <= step:
            break
        if found is not None:
            lost.append(found[1])
        if found is not None or not line.endswith(b"\n"):  # a damaged line within the kept ones stays
            keep = offset
    os.truncate(path, keep)
    return lost[::-1]


def _step_of(line: bytes) -> tuple[int, float] | None:
    """Return the step of a line of the metrics and its seconds; None if the line is damaged."""
    for record in parse_lines([line]):
        number, seconds = record.get("step"), record.get("step_seconds")
        if isinstance(number, int):
            return number, seconds if isinstance(seconds, int | float) else 0.0
    return None
