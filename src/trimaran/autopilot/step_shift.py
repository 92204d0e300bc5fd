"""Whether steps suddenly became longer or shorter without a change of the plan: a link degrades, or recovers.

What was measured before such a shift says little about what pays after it. Pure functions of step times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from trimaran.autopilot.trial import TimedStep
from trimaran.autopilot.verdict import Baseline
from trimaran.core.measured_speed import robust_sigma

RECENT_STEPS = 8  # that must all belong to the new speed, in both halves
MIN_EARLIER_STEPS, MAX_EARLIER_STEPS = 16, 64
MIN_SHIFT = 1.2  # times as long, or as short
MIN_DEVIATIONS = 1.5  # of a single step before the shift, that the median of each half moves


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShift:
    """From `step` on, a typical step takes `after` seconds and not `before` seconds."""

    step: int
    before: float
    after: float

    @property
    def is_slower(self) -> bool:
        return self.after > self.before

    def __str__(self) -> str:
        if self.is_slower:
            return f"steps take {self.after / self.before:.1f} times as long since step {self.step}"
        return f"steps are {1 - self.after / self.before:.0%} shorter since step {self.step}"


def find_shift(steps: Sequence[TimedStep], known: Baseline | None = None) -> StepShift | None:
    """Return the shift in the last steps under one plan; None if there is none, or too few steps are known.

    `known` is a step of this plan as a trial measured it before; it counts as long as there are few steps.
    """
    earlier, recent = steps[:-RECENT_STEPS][-MAX_EARLIER_STEPS:], steps[-RECENT_STEPS:]
    if len(recent) < RECENT_STEPS or (len(earlier) < MIN_EARLIER_STEPS and known is None):
        return None
    logs = [math.log(each.seconds) for each in earlier]
    if len(earlier) >= MIN_EARLIER_STEPS:
        before = median(logs)
        spread = robust_sigma(logs)
    else:
        assert known is not None
        before, spread = math.log(known.step_seconds), known.spread
    least = max(math.log(MIN_SHIFT), MIN_DEVIATIONS * spread)
    half = RECENT_STEPS // 2
    moved = [median(math.log(each.seconds) for each in part) - before for part in (recent[:half], recent[half:])]
    if min(map(abs, moved)) < least or moved[0] * moved[1] < 0:
        return None
    after = median(math.log(each.seconds) for each in recent)
    return StepShift(
        step=_first_step([*earlier, *recent], before, after), before=math.exp(before), after=math.exp(after)
    )


def _first_step(steps: Sequence[TimedStep], before: float, after: float) -> int:
    """Return the first step at the new speed. `before` and `after` are logarithms of seconds."""
    middle = (before + after) / 2
    is_new = [(math.log(each.seconds) - middle) * (after - before) > 0 for each in steps]
    first = next(index for index in range(len(steps) - RECENT_STEPS, len(steps)) if is_new[index])
    while first > 0 and is_new[first - 1]:
        first -= 1
    return steps[first].step
