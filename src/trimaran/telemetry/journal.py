"""Lines of JSON, written by one process and followed by others."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from trimaran.core import Event, EventKind, StepMetrics
from trimaran.telemetry.run_directory import RunDirectory


class Journal:
    """The open files of one rank: its events and, on rank 0, the metrics. Each line is written whole and at once."""

    def __init__(self, run: RunDirectory, rank: int) -> None:
        self.rank = rank
        self._events = _open_append(run.events(rank))
        self._metrics = _open_append(run.metrics) if rank == 0 else None

    def event(self, kind: EventKind, *, step: int = 0, **data: Any) -> None:
        record = Event(kind=kind, rank=self.rank, time=time.time(), step=step, data=data)
        self._events.write(_line(record.as_dict()))

    def step(self, metrics: StepMetrics) -> None:
        """Write one line of `metrics.jsonl`; on ranks other than 0 nothing happens."""
        if self._metrics is not None:
            self._metrics.write(_line(metrics.as_dict()))

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
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line


class Follower:
    """Yields the JSON lines that were added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFollower(path)

    def new(self) -> Iterator[dict[str, Any]]:
        return (json.loads(line) for line in self._lines.new())


def _open_append(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", encoding="utf-8", buffering=1)


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
