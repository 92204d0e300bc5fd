"""Which candidate to measure next, and when to stop: a pure function of the candidates and of what was measured."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from trimaran.core import show_bytes
from trimaran.planner.measure.step_time_model import StepTimeModel, expected_gain
from trimaran.planner.measure.trial_record import FAILED, TriedCandidate, TuneCandidate

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
    """The candidates to try, the most gain for its cost first, and those that are not to be tried.

    noise: the expected gain below which a trial is not worth it.
    """

    ordered: tuple[PlannedTrial, ...]
    left_out: tuple[LeftOut, ...]
    noise: float


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
        found.append(PlannedTrial(candidate=candidate, seconds=expected.seconds, sigma=expected.sigma, gain=gain,
                              cost_seconds=cost))  # fmt: skip
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


def count_failures(tried: Iterable[TriedCandidate]) -> int:
    return sum(each.outcome in FAILED for each in tried)


def costs_of(starts: Sequence[tuple[bool, float]], steps: Sequence[int]) -> TrialCosts:
    """Return the costs of trials so far; `starts` are (whether layers are compiled, seconds to the first step)."""
    plain = [seconds for compiled, seconds in starts if not compiled]
    compiled = [seconds for is_compiled, seconds in starts if is_compiled]
    return TrialCosts(
        plain_seconds=median(plain) if plain else None,
        compiled_seconds=median(compiled) if compiled else None,
        num_steps=median(steps) if steps else TrialCosts().num_steps,
    )
