"""Which steps of a run are steady, and what they measured: medians without warm-up, checkpoints and evaluation."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trimaran.core.measured_speed import median_error
from trimaran.runs.read.step_lines import StepLine, read_details
from trimaran.runs.record_types import is_number

MIN_STEADY_STEPS = 5
WARM_UP_STEPS = 3  # after each start of the ranks: torch compiles, and allocators and caches fill
# Events whose end they mark, `seconds` after their beginning: steps in between share disk and cores with them.
DISTURBING_EVENTS = ("checkpoint", "upload", "evaluation", "profile", "recompile", "sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadySteps:
    """Medians of the steady steps of one plan.

    busy_seconds: a step without the wait for data and the stall of checkpoints, which no plan predicts.
    standard_error: of `busy_seconds`, relative.
    peak_bytes: of the rank with the most, where that is known.
    """

    num_steps: int
    step_seconds: float
    busy_seconds: float
    standard_error: float
    tokens: float
    mfu: float
    peak_bytes: int
    phases: Mapping[str, float]
    last_time: float
    last_step: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds


def steady_steps(
    steps: Sequence[StepLine], starts: Sequence[float], events: Sequence[Mapping[str, Any]]
) -> SteadySteps | None:
    """Return the medians of the steady ones of `steps`; None if there are fewer than MIN_STEADY_STEPS.

    `starts` are the times at which ranks started. If checkpoints are written all the time, steps beside them count.
    """
    warm = _after_warm_up([step for step in steps if _is_usable(step)], starts)
    alone = _undisturbed(warm, events)
    found = alone if len(alone) >= MIN_STEADY_STEPS else warm
    return _medians(found) if len(found) >= MIN_STEADY_STEPS else None


def _is_usable(step: StepLine) -> bool:
    return 0 < step.step_seconds < math.inf and _busy(step) > 0


def _busy(step: StepLine) -> float:
    return step.step_seconds - step.phases.get("data", 0.0) - step.phases.get("checkpoint", 0.0)


def _after_warm_up(steps: Sequence[StepLine], starts: Sequence[float]) -> list[StepLine]:
    """Return the steps without the first ones after each start."""
    counts: dict[int, int] = {}
    found = []
    for step in steps:
        start = bisect_right(starts, step.time)
        counts[start] = counts.get(start, 0) + 1
        if counts[start] > WARM_UP_STEPS:
            found.append(step)
    return found


def _undisturbed(steps: Sequence[StepLine], events: Sequence[Mapping[str, Any]]) -> list[StepLine]:
    """Return the steps during which nothing was saved, evaluated, profiled or compiled."""
    spans = []
    for event in events:
        if event.get("kind") in DISTURBING_EVENTS:
            seconds, end = event.get("data", {}).get("seconds", 0.0), event["time"]
            spans.append((end - max(0.0, seconds), end) if is_number(seconds) else (end, end))
    return [step for step in steps if not any(_overlaps(step, *span) for span in spans)] if spans else list(steps)


def _overlaps(step: StepLine, begin: float, end: float) -> bool:
    """Return whether the step ran between `begin` and `end`. Its line is written up to one step after its end."""
    return begin <= step.time and step.time - 2 * step.step_seconds <= end


def _medians(steps: Sequence[StepLine]) -> SteadySteps:
    busy = [_busy(step) for step in steps]
    middle = median(busy)
    mfus = [step.mfu for step in steps if step.mfu > 0]
    return SteadySteps(
        num_steps=len(steps),
        step_seconds=median(step.step_seconds for step in steps),
        busy_seconds=middle,
        standard_error=median_error(busy) / middle,
        tokens=median(step.tokens for step in steps),
        mfu=median(mfus) if mfus else 0.0,
        peak_bytes=_peak(steps),
        phases={name: median(step.phases.get(name, 0.0) for step in steps) for name in steps[-1].phases},
        last_time=steps[-1].time,
        last_step=steps[-1].step,
    )


def _peak(steps: Sequence[StepLine]) -> int:
    """Return the highest peak of rank 0, or of all ranks if the last line that compares them says so."""
    own = max(step.peak_bytes for step in steps)
    for step in reversed(steps):
        if b'"ranks"' in step.rest:
            ranks = read_details(step.rest).get("ranks")
            highest = ranks.get("peak_bytes", {}).get("max", 0) if isinstance(ranks, dict) else 0
            return max(own, int(highest)) if isinstance(highest, int | float) else own
    return own
