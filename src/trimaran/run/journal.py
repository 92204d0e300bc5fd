"""Lines of JSON, written by one process and followed by others.

A process may be killed, and a disk may fill up, in the middle of a line. The next line begins on a line of its own all
the same, and readers pass over what is none.
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

DISK_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE}


class LineWriter:
    """A file of JSON lines, open at its end. A disk that takes no more costs lines, which is told once, not the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._fails = False

    def write(self, record: dict[str, Any]) -> None:
        """Add `record`, whole and at once."""
        line = _line(record).encode()
        size = os.fstat(self._fd).st_size
        is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        data = b"\n" + line if is_torn else line
        try:
            is_whole = os.write(self._fd, data) == len(data)
        except OSError as error:
            if error.errno not in DISK_TROUBLE:
                raise
            self._tell(error.strerror or str(error))
            return
        self._tell("" if is_whole else "no space is left")

    def close(self) -> None:
        os.close(self._fd)

    def _tell(self, why: str) -> None:
        if why and not self._fails:
            log.warning("lines of %s are lost: %s", self.path, why)
        self._fails = bool(why)


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
        """Write one line of `metrics.jsonl`; on ranks other than 0 nothing happens."""
        if self._metrics is not None:
            self._metrics.write(metrics.as_dict())

    def resume(self, step: int) -> None:
        """Take back the metrics of all steps after `step`: they are done again. An event tells what they had cost."""
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
    """Yields the lines that were added to a file since the last look. A half-written line waits for its end.

    The first look goes back at most `backlog` bytes; None is the whole file.
    """

    def __init__(self, path: Path, *, backlog: int | None = None) -> None:
        self._path = path
        self._offset = 0 if backlog is None or not path.exists() else max(0, path.stat().st_size - backlog)

    def new(self) -> Iterator[bytes]:
        try:
            if self._path.stat().st_size == self._offset:
                return  # many files are looked at many times a second, and few have grown
        except FileNotFoundError:
            return
        with self._path.open("rb") as file:
            self._offset = min(self._offset, os.fstat(file.fileno()).st_size)  # lines may be taken back
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line


class Follower:
    """Yields the JSON lines that were added to a file since the last look; `backlog` as of `LineFollower`."""

    def __init__(self, path: Path, *, backlog: int | None = None) -> None:
        self._lines = LineFollower(path, backlog=backlog)

    def new(self) -> Iterator[dict[str, Any]]:
        return parse_lines(self._lines.new())


def parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the records of `lines`; what is none, such as the half of one, is passed over."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def last_step(run: RunDirectory) -> int:
    """Return the last step that the run has metrics of; 0 when there is none."""
    last = deque(Follower(run.metrics).new(), maxlen=1)
    return last[0].get("step", 0) if last else 0


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add `record` to the JSON lines at `path`, whole and at once."""
    writer = LineWriter(path)
    try:
        writer.write(record)
    finally:
        writer.close()


def forget_steps_after(step: int, path: Path) -> list[float]:
    """Cut the metrics at `path` behind the last line whose step is not above `step`; return the lost steps' seconds."""
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
    """Return `record` as one line of strict JSON; a NaN or an infinity becomes null, which every reader can parse."""
    return json.dumps(_finite(record), allow_nan=False, separators=(",", ":")) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
