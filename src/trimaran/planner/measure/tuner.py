"""The loop of a tuning: measure the planner's choice, then what promises most, until time is over or nothing does."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, Protocol

from trimaran.core import Plan, Recipe, show_bytes
from trimaran.planner import Question
from trimaran.planner.measure.step_time_model import StepTimeModel, expected_gain
from trimaran.planner.measure.trial_record import (
    MeasuredTrial,
    TrialLimits,
    TrialStore,
    TriedCandidate,
    TuneCandidate,
    Workers,
    combine,
)
from trimaran.planner.search.goals import predicted
from trimaran.planner.search.neighbours import keeps_pins, neighbours

StopReason = Literal["time", "noise", "nothing left", "interrupted"]
MIN_GAIN = 0.002  # of a step: less is not worth a trial
# Of the standard error of the best measurement. An expected gain is an average: a gain of one standard error that a
# trial has with one chance in four is still worth it.
NOISE_FRACTION = 0.25
MAX_FAILURES = 2  # of plans with the same change, before others with it are left out
DEFAULT_COST_SECONDS = 20.0  # of the first trial
COMPILE_SECONDS = 30.0  # of a trial with compiled layers before one was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCosts:
    """What trials have cost so far: the median seconds to the first step, with and without compiled layers."""

    plain_seconds: float | None = None
    compiled_seconds: float | None = None
    num_steps: float = 15.0

    def of(self, candidate: TuneCandidate, step_seconds: float) -> float:
        """Return the seconds that a trial of the candidate should take."""
        start = self.compiled_seconds if candidate.plan.compile else self.plain_seconds
        if start is None:
            start = (self.plain_seconds or DEFAULT_COST_SECONDS) + (COMPILE_SECONDS if candidate.plan.compile else 0.0)
        return start + self.num_steps * step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrial:
    """A candidate that was not tried: its expected step, the gain to expect of a trial, and what the trial costs."""

    candidate: TuneCandidate
    seconds: float
    sigma: float
    gain: float
    cost_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A candidate that is not to be tried, and why."""

    candidate: TuneCandidate
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrials:
    """The candidates to try, the most gain for its cost first, and those that are not to be tried."""

    ordered: tuple[PlannedTrial, ...]
    left_out: tuple[LeftOut, ...]
    noise: float  # the expected gain below which a trial is not worth it


def best_of(tried: Iterable[TriedCandidate]) -> TriedCandidate | None:
    """Return the fastest candidate of those that were measured in full."""
    found = [each for each in tried if each.outcome == "measured" and each.seconds]
    return min(found, key=lambda each: each.seconds or math.inf, default=None)


def propose(
    candidates: Mapping[str, TuneCandidate], tried: Mapping[str, TriedCandidate], costs: TrialCosts
) -> PlannedTrials:
    """Return which of the candidates to try next: by expected gain, divided by the root of the trial's cost."""
    best = best_of(tried.values())
    model = StepTimeModel(list(tried.values()))
    # Not the measured time itself: the fastest of many measurements looks faster than it is.
    best_seconds = model.expect(best.candidate).seconds if best else math.inf
    left_out: list[LeftOut] = []
    found: list[PlannedTrial] = []
    for key, candidate in candidates.items():
        if key in tried:
            continue
        if why := why_not(candidate, list(tried.values())):
            left_out.append(LeftOut(candidate=candidate, why=why))
            continue
        expected = model.expect(candidate)
        gain = expected_gain(best_seconds, expected) if best else math.inf
        cost = costs.of(candidate, expected.seconds)
        found.append(PlannedTrial(candidate=candidate, **expected._asdict(), gain=gain, cost_seconds=cost))
    # With nothing measured, the planner's order counts: every gain is infinite, and the sort is stable.
    ordered = sorted(found, key=lambda each: -each.gain / math.sqrt(each.cost_seconds))
    error = math.hypot(best.sigma, model.noise) if best else 0.0
    return PlannedTrials(ordered=tuple(ordered), left_out=tuple(left_out), noise=max(MIN_GAIN, NOISE_FRACTION * error))


def why_not(candidate: TuneCandidate, tried: Sequence[TriedCandidate]) -> str:
    """Return why a candidate is not worth a trial: it does not fit, or plans like it failed; '' if it is."""
    prediction = candidate.plan.prediction
    if prediction is not None:
        if not prediction.fits:
            return f"it should not fit: {show_bytes(prediction.device_bytes or prediction.peak_bytes)}"
        failed = [each.candidate.plan.prediction for each in tried if each.outcome == "out of memory"]
        least = min((each.peak_bytes for each in failed if each is not None), default=math.inf)
        if prediction.peak_bytes >= least:
            return "it should need as much memory as a plan that ran out of it"
    same = [each for each in tried if each.candidate.origin == candidate.origin != "planner"]
    broken = [each for each in same if each.outcome in ("refused", "failed")]
    if len(broken) >= MAX_FAILURES and len(broken) == len(same):
        return f"{len(broken)} plans with another {candidate.origin} failed"
    return ""


def costs_of(starts: Sequence[tuple[bool, float]], steps: Sequence[int]) -> TrialCosts:
    """Return the costs of trials so far; `starts` are (whether layers are compiled, seconds to the first step)."""
    plain = [seconds for compiled, seconds in starts if not compiled]
    compiled = [seconds for is_compiled, seconds in starts if is_compiled]
    return TrialCosts(
        plain_seconds=median(plain) if plain else None,
        compiled_seconds=median(compiled) if compiled else None,
        num_steps=median(steps) if steps else TrialCosts().num_steps,
    )


WORKER_COUNTS: tuple[Workers, ...] = ("auto", 0, 1, 2, 4)
MIN_DATA_FRACTION = 0.03  # of a step spent waiting for data: below it, loader processes cannot help
NUM_BASES = 2  # of the fastest plans whose neighbours are candidates
MAX_CONFIRMATIONS = 2  # plans that are compared once more with the planner's first choice
STEADY_FRACTION = 0.03  # of the whole time, for the steps of one trial
MIN_STEADY_SECONDS, MAX_STEADY_SECONDS = 5.0, 60.0
RESERVE = 1.5  # times the expected cost of the last comparison, which must not fall victim to a slow trial


MeasureTrial = Callable[[TuneCandidate, TrialLimits], MeasuredTrial]
"""Measures one candidate in a new run directory of the store."""


class TuneView(Protocol):
    """Shows what a tuning does."""

    def starting(self, candidate: TuneCandidate, *, why: str, best: TriedCandidate | None, left: float) -> None: ...

    def finished(self, record: MeasuredTrial, candidate: TuneCandidate) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """All that a tuning found: what was tried, what was not and why, the planner's first choice, and the best."""

    tried: tuple[TriedCandidate, ...]
    proposals: tuple[PlannedTrial, ...]
    left_out: tuple[LeftOut, ...]
    first: TriedCandidate | None
    best: TriedCandidate | None
    stopped: StopReason
    why: str
    seconds: float
    num_new: int

    @property
    def gain(self) -> float | None:
        """How much shorter a step of the best plan is than one of the planner's first choice, as a fraction of it."""
        if not self.first or not self.best or not self.first.seconds or not self.best.seconds:
            return None
        return 1 - self.best.seconds / self.first.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneTask:
    """What to tune: the question, the recipe of the trials, and the planner's plans, the best first."""

    question: Question
    recipe: Recipe
    ranked: Sequence[Plan]
    minutes: float = 10.0  # for trials
    min_gain: float | None = None  # expected, of a step, below which there are no more trials; None: the noise
    free_workers: bool = True  # try other numbers of loader processes, too


class Tuner:
    """A tuning: its candidates, and the records so far."""

    def __init__(
        self,
        task: TuneTask,
        store: TrialStore,
        measure: MeasureTrial,
        view: TuneView,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.question, self.recipe = task.question, task.recipe
        self.minutes, self.min_gain, self.free_workers = task.minutes, task.min_gain, task.free_workers
        self.store, self.measure, self.view, self.clock = store, measure, view, clock
        self._candidates: dict[str, TuneCandidate] = {}
        self._expanded: set[str] = set()  # candidates whose neighbours are candidates
        self._num_new, self._deadline = 0, 0.0
        self._add(TuneCandidate(plan=plan, workers=self.recipe.data.workers) for plan in task.ranked)

    def run(self) -> TuneResult:
        """Measure until time is over, nothing promises a gain, or Ctrl-C; return what is known then."""
        began = self.clock()
        self._deadline = began + 60 * self.minutes
        try:
            stopped, why = self._measure_all()
        except KeyboardInterrupt:
            stopped, why = "interrupted", "interrupted; the same command continues"
        tried = self.tried()
        proposals = propose(self._candidates, tried, self._costs())
        return TuneResult(
            tried=tuple(tried.values()),
            proposals=proposals.ordered,
            left_out=proposals.left_out,
            first=tried.get(self._first.key),
            best=best_of(tried.values()),
            stopped=stopped,
            why=why,
            seconds=self.clock() - began,
            num_new=self._num_new,
        )

    @property
    def _first(self) -> TuneCandidate:
        return next(iter(self._candidates.values()))

    def tried(self) -> dict[str, TriedCandidate]:
        """Return what is known of the candidates, with those of earlier tunings that keep the pins."""
        first = self._first.plan
        for record in self.store.records:
            if record.key not in self._candidates:
                plan = Plan.model_validate(dict(record.plan))
                if keeps_pins(plan, self.question.pins) and trains_alike(plan, first):
                    plan = plan if self.question.outline is None else predicted(plan, self.question)
                    found = TuneCandidate(plan=plan, workers=record.workers, origin=record.origin)
                    self._candidates[record.key] = found
        return combine(self.store.records, self._candidates)

    def _measure_all(self) -> tuple[StopReason, str]:
        if self._first.key not in self.tried():
            self._try(self._first, "the planner's first choice", is_first=True)
        while True:
            tried = self.tried()
            # Neighbours of the fastest plans so far, or of the first choice if nothing could be measured.
            measured = [each for each in tried.values() if each.outcome == "measured" and each.seconds]
            bases = sorted(measured, key=lambda each: each.seconds or 0.0)[:NUM_BASES]
            for base in [each.candidate for each in bases] or [self._first]:
                if base.key in self._expanded:
                    continue
                self._expanded.add(base.key)
                for each in neighbours(base.plan, self.question):
                    if trains_alike(each.plan, self._first.plan):
                        self._add([TuneCandidate(plan=each.plan, workers=base.workers, origin=each.kind)])
            for base in bases[:1]:
                if self.free_workers and base.data_fraction > MIN_DATA_FRACTION:
                    origin, plan = "loader processes", base.candidate.plan
                    self._add(TuneCandidate(plan=plan, workers=count, origin=origin) for count in WORKER_COUNTS)
            proposals = propose(self._candidates, tried, self._costs())
            if self._confirm(tried, proposals):
                continue
            if not proposals.ordered:
                return "nothing left", "every candidate was tried or left out"
            if self._is_noise(proposals):
                most, noise = max(each.gain for each in proposals.ordered), proposals.noise
                limit = f"the noise is {noise:.1%}" if self.min_gain is None else f"{self.min_gain:.1%} is asked"
                return "noise", f"no trial is expected to gain more than {most:.1%}, and {limit}"
            chosen = next((each for each in proposals.ordered if self._has_time_for(each.cost_seconds)), None)
            if chosen is None:
                return "time", f"{self.minutes:g} minutes are over"
            why = f"expected gain {chosen.gain:.1%}" if chosen.gain < 1 else "nothing measured yet"
            self._try(chosen.candidate, why)

    def _is_noise(self, proposals: PlannedTrials) -> bool:
        limit = proposals.noise if self.min_gain is None else self.min_gain
        return max((each.gain for each in proposals.ordered), default=0.0) < limit

    def _confirm(self, tried: dict[str, TriedCandidate], proposals: PlannedTrials) -> bool:
        """Measure the first choice and the best once more if no more trials follow. Returns whether it did.

        The fastest of many measurements looks faster than it is, and a machine may get slower with time.
        """
        best, first = best_of(tried.values()), tried.get(self._first.key)
        if best is None or first is None or first.seconds is None or best is first:
            return False
        if best.num_trials > 1 or sum(each.num_trials > 1 for each in tried.values()) > MAX_CONFIRMATIONS:
            return False
        # Ask as if both were measured already: is there time for another trial after them?
        pair = RESERVE * sum(self._costs().of(each.candidate, each.seconds or 0.0) for each in (best, first))
        cheapest = min((each.cost_seconds for each in proposals.ordered), default=0.0)
        is_last = not proposals.ordered or self._is_noise(proposals) or not self._has_time_for(pair + cheapest)
        if not is_last or not self._has_time_for(pair / RESERVE):
            return False
        self._try(first.candidate, "measured once more, to compare")
        self._try(best.candidate, "measured once more, to compare")
        return True

    def _try(self, candidate: TuneCandidate, why: str, *, is_first: bool = False) -> None:
        tried = self.tried()
        best = best_of(tried.values())
        self.view.starting(candidate, why=why, best=best, left=self._deadline - self.clock())
        again = candidate.key in tried
        steady = min(MAX_STEADY_SECONDS, max(MIN_STEADY_SECONDS, STEADY_FRACTION * 60 * self.minutes))
        limits = TrialLimits(
            start_seconds=self.recipe.faults.start_seconds,
            steady_seconds=steady,
            best_seconds=best.seconds if best and not again else None,
        )
        # The first trial may take longer than the whole time: without it there is nothing to compare with.
        limits = limits if is_first else replace(limits, deadline=self._deadline)
        record = self.measure(candidate, limits)
        self._num_new += 1
        self.store.add(record)
        self.view.finished(record, candidate)

    def _has_time_for(self, seconds: float) -> bool:
        return self.clock() + seconds < self._deadline

    def _costs(self) -> TrialCosts:
        timed = [record for record in self.store.records if record.has_time]
        starts = [(bool(record.plan.get("compile")), record.start_seconds) for record in timed]
        return costs_of(starts, [int((record.measured or {}).get("steps", 0)) + 4 for record in timed])

    def _add(self, candidates: Iterable[TuneCandidate]) -> None:
        for candidate in candidates:
            self._candidates.setdefault(candidate.key, candidate)


def trains_alike(plan: Plan, other: Plan) -> bool:
    """Return whether two plans train the same: nothing differs that changes results beyond rounding."""
    comm, same = plan.comm, other.comm
    return (
        plan.global_batch == other.global_batch
        and (plan.precision, plan.engine) == (other.precision, other.engine)
        and (comm.compression, comm.local_steps, comm.async_sgd) == (same.compression, same.local_steps, same.async_sgd)
    )
