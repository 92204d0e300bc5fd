"""Files of JSON lines, written by one process and followed by others.

A process may be killed, and a disk may fill up, in the middle of a line. The next record then starts on a new line, and
readers skip the broken one.
"""

import errno
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trimaran.core import Event, EventKind, StepMetrics
from trimaran.run.run_directory import RunDirectory

log = logging.getLogger(__name__)

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE}


class LineWriter:
    """Appends JSON lines to a file. If the disk is full or broken, lines are lost with one warning; it never raises."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._is_failing = False

    def write(self, record: dict[str, Any]) -> None:
        """Append `record` with one system call."""
        line = _line(record).encode()
        size = os.fstat(self._fd).st_size
        is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        data = b"\n" + line if is_torn else line
        try:
            is_complete = os.write(self._fd, data) == len(data)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            self._warn_once(error.strerror or str(error))
            return
        self._warn_once("" if is_complete else "no space is left")

    def close(self) -> None:
        os.close(self._fd)

    def _warn_once(self, why: str) -> None:
        if why and not self._is_failing:
            log.warning("lines of %s are lost: %s", self.path, why)
        self._is_failing = bool(why)


class Journal:
    """The open files of one rank: its events and, on rank 0, the metrics."""

    def __init__(self, run: RunDirectory, rank: int, *, attempt: int = 0) -> None:
        self.rank, self.attempt = rank, attempt
        self._events = LineWriter(run.events(rank))
        self._metrics = LineWriter(run.metrics) if rank == 0 else None

    def event(self, kind: EventKind, *, step: int = 0, **data: Any) -> None:
        record = Event(kind=kind, rank=self.rank, time=time.time(), step=step, attempt=self.attempt, data=data)
        self._events.write(record.as_dict())

    def step(self, metrics: StepMetrics) -> None:
        """Write one line of `metrics.jsonl`. Ranks other than 0 write nothing."""
        if self._metrics is not None:
            self._metrics.write(metrics.as_dict())

    def resume(self, step: int) -> None:
        """Delete the metrics of all steps after `step`, which are repeated. A `replay` event records their cost."""
        if self._metrics is not None:
            lost = forget_steps_after(step, self._metrics.path)
            if lost:
                self.event("replay", step=step, steps=len(lost), seconds=sum(lost))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._events.close()
        if self._metrics is not None:
            self._metrics.close()


class LineFollower:
    """Yields the lines that were added to a file since the last call. An incomplete last line is left for later.

    The first call goes back at most `backlog` bytes; None is the whole file.
    """

    def __init__(self, path: Path, *, backlog: int | None = None) -> None:
        self._path = path
        self._offset = 0 if backlog is None or not path.exists() else max(0, path.stat().st_size - backlog)

    def new(self) -> Iterator[bytes]:
        try:
            if self._path.stat().st_size == self._offset:
                return  # many files are polled many times a second, and few have grown
        except FileNotFoundError:
            return
        with self._path.open("rb") as file:
            self._offset = min(self._offset, os.fstat(file.fileno()).st_size)  # `Journal.resume` may shorten the file
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line


class JsonlFollower:
    """Yields the records that were added to a file since the last call; `backlog` as in `LineFollower`."""

    def __init__(self, path: Path, *, backlog: int | None = None) -> None:
        self._lines = LineFollower(path, backlog=backlog)

    def new(self) -> Iterator[dict[str, Any]]:
        return parse_lines(self._lines.new())


def parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the records of `lines`, and skip lines that are not a JSON object."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def last_step(run: RunDirectory) -> int:
    """Return the last step that the run has metrics for; 0 if there is none."""
    last = deque(JsonlFollower(run.metrics).new(), maxlen=1)
    return last[0].get("step", 0) if last else 0


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append `record` to the JSON lines at `path`."""
    writer = LineWriter(path)
    try:
        writer.write(record)
    finally:
        writer.close()


def forget_steps_after(step: int, path: Path) -> list[float]:
    """Truncate the metrics at `path` after the last line of a step up to `step`; return the lost steps' seconds."""
    keep, lost = 0, []
    with path.open("rb+") as file:
        for line in file:
            records = [*parse_lines([line])]
            if lost or any(record.get("step", 0) > step for record in records) or not line.endswith(b"\n"):
                lost += [record.get("step_seconds") or 0.0 for record in records]
            else:
                keep += len(line)
        file.truncate(keep)
    return lost


def _line(record: dict[str, Any]) -> str:
    """Return `record` as one line of strict JSON. NaN and Inf become null, which every reader can parse."""
    return json.dumps(_finite(record), allow_nan=False, separators=(",", ":")) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
