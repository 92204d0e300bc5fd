"""The attempts of a run, one per start of its ranks, and how each ended: the lines of `attempts.jsonl`."""

import os
import platform
import time
from dataclasses import dataclass
from typing import Any, Literal

from trimaran.runs.journal import JsonlFollower
from trimaran.runs.line_files import LineWriter
from trimaran.runs.run_directory import RunDirectory

AttemptOutcome = Literal["done", "stopped", "trouble"]
_START_FIELDS = ("time", "world_size", "host", "pid")


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One start of the ranks. `ended` is None while they run; `step` is the last step that all ranks finished."""

    number: int
    time: float
    world_size: int
    host: str
    pid: int
    ended: float | None = None
    how: AttemptOutcome | None = None
    step: int = 0


class AttemptLog:
    """Writes the attempts of a supervisor."""

    def __init__(self, run: RunDirectory) -> None:
        self._writer = LineWriter(run.attempts, reserve=run.reserve)
        self.count = len(read_attempts(run).attempts)

    def begin(self, *, world_size: int) -> int:
        """Write that ranks are being started, and return the number of this attempt."""
        number, self.count = self.count, self.count + 1
        here = {"host": platform.node(), "pid": os.getpid()}
        self._write({"attempt": number, "time": time.time(), "world_size": world_size} | here)
        return number

    def end(self, how: AttemptOutcome, *, step: int) -> None:
        """Write that the ranks of the last attempt are gone."""
        self._write({"attempt": self.count - 1, "ended": time.time(), "how": how, "step": step})

    def over(self, code: int, why: str) -> None:
        """Write that the supervisor ends with exit code `code`. Ranks start again only if the user resumes the run."""
        self._write({"over": code, "why": why, "time": time.time()})

    def flush(self) -> None:
        """Write the lines that could not be written before."""
        if self._writer.failure:
            self._writer.flush()
            self._writer.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._writer.write(record)
        self._writer.close()  # lines are hours apart


class Attempts:
    """The attempts read so far. `over` is the exit code once a supervisor has ended, until another one starts."""

    def __init__(self, run: RunDirectory) -> None:
        self.attempts: list[Attempt] = []
        self.over: int | None = None
        self.why = ""
        self.over_time = 0.0
        self._follower = JsonlFollower(run.attempts)

    def refresh(self) -> bool:
        """Read the new lines, and return whether ranks were started since the last call."""
        before = len(self.attempts)
        for line in self._follower.new():
            self._read(line)
        return len(self.attempts) > before

    def _read(self, line: dict[str, Any]) -> None:
        if "over" in line:
            self.over, self.why, self.over_time = line["over"], line.get("why", ""), float(line.get("time", 0.0))
        elif "ended" in line and self.attempts:
            last = self.attempts[-1]
            last.ended, last.how, last.step = line["ended"], line.get("how"), line.get("step", 0)
        elif line.keys() >= {"attempt", *_START_FIELDS}:
            fields = {key: line[key] for key in _START_FIELDS}
            self.attempts.append(Attempt(number=line["attempt"], **fields))
            self.over, self.why = None, ""


def read_attempts(run: RunDirectory) -> Attempts:
    attempts = Attempts(run)
    attempts.refresh()
    return attempts
