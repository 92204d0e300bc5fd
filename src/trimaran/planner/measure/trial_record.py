"""What trials measured: candidates, records of single trials, what all say together, and the folder that keeps them."""

import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self

from trimaran.core import Plan, UserError
from trimaran.runs import append_line, read_json_lines

Workers = int | Literal["auto"]
TrialOutcome = Literal["measured", "slower", "out of memory", "refused", "failed", "unfinished"]
WITH_TIME: tuple[TrialOutcome, ...] = ("measured", "slower")
FAILED: tuple[TrialOutcome, ...] = ("out of memory", "refused", "failed")
MIN_SIGMA = 0.005  # of a step time: two runs of one plan differ by about that much on an idle machine


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLimits:
    """When a trial ends."""

    deadline: float = math.inf  # of `time.monotonic`
    best_seconds: float | None = None  # the fastest step so far
    start_seconds: float = 900.0  # to the first step
    steady_seconds: float = 30.0  # of steps that count, unless fewer than needed fit into it


@dataclass(frozen=True, kw_only=True)  # without slots, for the cached key
class TuneCandidate:
    """A plan with its prediction, and the loader processes to run it with. `origin` says where it comes from."""

    plan: Plan
    workers: Workers = "auto"
    origin: str = "planner"

    @cached_property
    def key(self) -> str:
        """A digest of everything that a trial depends on; equal candidates are measured once."""
        text = json.dumps([self.plan.model_dump(mode="json"), self.workers], sort_keys=True)
        return sha256(text.encode()).hexdigest()[:16]

    @property
    def predicted_seconds(self) -> float | None:
        return float(self.plan.prediction.step_seconds) if self.plan.prediction else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTrial:
    """One trial; a line of `trials.jsonl`. `measured` has `sigma`, the relative standard error of the median step."""

    key: str
    plan: Mapping[str, Any]
    workers: Workers
    origin: str
    run: str
    outcome: TrialOutcome
    reason: str = ""
    predicted: Mapping[str, float] | None = None
    measured: Mapping[str, float] | None = None
    trial_seconds: float = 0.0  # from the start of the processes to their end
    start_seconds: float = 0.0  # to the first finished step
    time: float = 0.0

    @property
    def step_seconds(self) -> float:
        """The median of the steady steps, with the wait for data; 0 if there are none."""
        return float((self.measured or {}).get("step_seconds", 0.0))

    @property
    def has_time(self) -> bool:
        return self.outcome in WITH_TIME and self.step_seconds > 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Self:
        """Return the record that `as_dict` wrote; raise TypeError or ValueError if it is another one."""
        record = cls(**tree)
        Plan.model_validate(dict(record.plan))
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedCandidate:
    """What all trials of one candidate say together. `sigma` is relative; `seconds` is None if none gave a time."""

    candidate: TuneCandidate
    outcome: TrialOutcome
    reason: str = ""
    seconds: float | None = None
    sigma: float = 0.0
    num_steps: int = 0
    num_trials: int = 1
    peak_bytes: int = 0
    data_fraction: float = 0.0
    runs: tuple[str, ...] = ()


def combine(records: Iterable[MeasuredTrial], candidates: Mapping[str, TuneCandidate]) -> dict[str, TriedCandidate]:
    """Return what is known of tried candidates, in the order of first trials; unfinished trials do not count."""
    groups: dict[str, list[MeasuredTrial]] = {}
    for record in records:
        if record.outcome != "unfinished" and record.key in candidates:
            groups.setdefault(record.key, []).append(record)
    return {key: _combined(candidates[key], group) for key, group in groups.items()}


def _combined(candidate: TuneCandidate, records: Sequence[MeasuredTrial]) -> TriedCandidate:
    timed = [record for record in records if record.has_time]
    if not timed:
        last = records[-1]
        return TriedCandidate(candidate=candidate, outcome=last.outcome, reason=last.reason, num_trials=len(records),
                              runs=tuple(each.run for each in records))  # fmt: skip
    full = [record for record in timed if record.outcome == "measured"] or timed
    figures = [record.measured or {} for record in full]
    logs = [math.log(record.step_seconds) for record in full]
    mean = fmean(logs)
    own = math.sqrt(fmean(max(MIN_SIGMA, each.get("sigma", 0.0)) ** 2 for each in figures) / len(full))
    between = math.sqrt(sum((each - mean) ** 2 for each in logs) / len(logs) / max(1, len(logs) - 1))
    return TriedCandidate(
        candidate=candidate,
        outcome=full[-1].outcome,
        reason=full[-1].reason,
        seconds=math.exp(mean),
        sigma=max(own, between),
        num_steps=int(sum(each.get("steps", 0) for each in figures)),
        num_trials=len(records),
        peak_bytes=int(max(each.get("peak_bytes", 0) for each in figures)),
        data_fraction=fmean(each.get("data_fraction", 0.0) for each in figures),
        runs=tuple(each.run for each in records),
    )


TRIALS = "trials.jsonl"
ABOUT = "about.json"
LOCK = "lock"


class TrialStore:
    """The records of a folder. Lines before the last one that says `again` do not count any more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[MeasuredTrial] = []
        self._num_runs = 0

    @property
    def path(self) -> Path:
        return self.folder / TRIALS

    def read(self) -> None:
        """Read the records that are on disk. Damaged lines are left out: their plans are measured again."""
        self.records = []
        for tree in read_json_lines(self.path):
            if tree.get("again"):
                self.records = []
                continue
            try:
                self.records.append(MeasuredTrial.from_dict(tree))
            except (TypeError, ValueError):
                continue
        numbers = [int(path.name.removeprefix("trial-")) for path in self.folder.glob("trial-[0-9]*")
                   if path.name.removeprefix("trial-").isdigit()]  # fmt: skip
        self._num_runs = max(numbers, default=0)

    def add(self, record: MeasuredTrial) -> None:
        """Keep a record, on disk at once."""
        self.records.append(record)
        append_line(self.path, record.as_dict())

    def forget(self) -> None:
        """Have all records so far not count any more."""
        if self.records:
            append_line(self.path, {"again": True, "time": time.time()})
        self.records = []

    def new_run(self) -> Path:
        """Return the path of the next trial's run directory."""
        self._num_runs += 1
        return self.folder / f"trial-{self._num_runs:03d}"

    def runs(self) -> list[Path]:
        """Return the run directories of the records that count, which were measured."""
        return [self.folder / record.run for record in self.records if record.has_time]


@contextmanager
def locked_folder(folder: Path, about: dict[str, object]) -> Iterator[TrialStore]:
    """Create the folder if needed and lock it, and yield its records. Raises if another process tunes in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError("D003.results-cannot-written", where=str(folder), reason=error.strerror) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError("A040.another-trimaran-tune", where=str(folder)) from None
        (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        store = TrialStore(folder)
        store.read()
        yield store
    finally:
        os.close(descriptor)
