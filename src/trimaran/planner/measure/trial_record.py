"""What trials measured: candidates, records of single trials, and what all trials of a candidate say together."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from statistics import fmean
from typing import Any, Literal, Self

from trimaran.core import Plan

Workers = int | Literal["auto"]
TrialOutcome = Literal["measured", "slower", "out of memory", "refused", "failed", "unfinished"]
WITH_TIME: tuple[TrialOutcome, ...] = ("measured", "slower")
FAILED: tuple[TrialOutcome, ...] = ("out of memory", "refused", "failed")
MIN_SIGMA = 0.005  # of a step time: two runs of one plan differ by about that much on an idle machine


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLimits:
    """When a trial ends. `deadline` is a time of `time.monotonic`; `best_seconds` is the fastest step so far.

    start_seconds: to the first step. steady_seconds: of steps that count, unless fewer than needed fit into it.
    """

    deadline: float = math.inf
    best_seconds: float | None = None
    start_seconds: float = 900.0
    steady_seconds: float = 30.0


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
    """One trial; a line of `trials.jsonl`.

    step_seconds: the median of the steady steps, with the wait for data; 0 if there are none.
    sigma: the standard error of that median, relative.
    trial_seconds: from the start of the processes to their end; start_seconds: to the first finished step.
    """

    key: str
    plan: Mapping[str, Any]
    workers: Workers
    origin: str
    run: str
    outcome: TrialOutcome
    reason: str = ""
    predicted: Mapping[str, float] | None = None
    measured: Mapping[str, float] | None = None
    trial_seconds: float = 0.0
    start_seconds: float = 0.0
    time: float = 0.0

    @property
    def step_seconds(self) -> float:
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
    """Return what is known of each of `candidates` that was tried, by key, in the order of the first trials.

    Trials that ended before they had a result do not count: they may be repeated.
    """
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
