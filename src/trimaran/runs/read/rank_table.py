"""The newest measures of every rank, one row each: `telemetry/ranks.json`, which rank 0 replaces every few seconds.

The metrics have only the spread over ranks and the outliers, so that a line of a thousand ranks stays short.
"""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.core import read_regular_bytes, write_atomically
from trimaran.runs.record_types import DAMAGED, is_count, is_number, is_time

MAX_FILE_BYTES = 16 << 20
SECONDS_DECIMALS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """The measures of all ranks in one step: a list for each measure, with a value for each rank."""

    step: int
    time: float
    measures: dict[str, list[float]]


class RankTableWriter:
    """Replaces the file at most once in `seconds`. Only rank 0 has one. It never raises: training goes on without."""

    def __init__(self, path: Path, *, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._path, self._seconds, self._now = path, seconds, now
        self._due = 0.0

    @property
    def is_due(self) -> bool:
        return self._seconds > 0 and self._now() >= self._due

    def write(self, step: int, names: Sequence[str], rows: Sequence[Sequence[float]]) -> None:
        """Write the measures `names` of `step`; `rows` has a row for each rank."""
        self._due = self._now() + self._seconds
        columns = zip(names, zip(*rows, strict=True), strict=True)
        measures = {name: [round(each, SECONDS_DECIMALS) for each in column] for name, column in columns}
        text = json.dumps({"step": step, "time": round(time.time(), 3), "measures": measures}, separators=(",", ":"))
        with contextlib.suppress(OSError):  # such as a full disk
            self._path.parent.mkdir(exist_ok=True)
            write_atomically(self._path, text + "\n")


def read_rank_table(path: Path) -> RankTable | None:
    """Return the table; None if there is none, or if it is damaged."""
    with contextlib.suppress(*DAMAGED):
        tree: Any = json.loads(read_regular_bytes(path, limit_bytes=MAX_FILE_BYTES))
        step, written, found = tree["step"], tree["time"], tree["measures"]
        measures = {str(name): [float(each) if is_number(each) else 0.0 for each in column]
                    for name, column in found.items()}  # fmt: skip
        if is_count(step) and is_time(written) and len({len(column) for column in measures.values()}) == 1:
            return RankTable(step=step, time=written, measures=measures)
    return None
