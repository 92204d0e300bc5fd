"""Whether a change made steps shorter: a test that knows the noise of step times.

Step times have outliers, neighbouring ones are alike, and they drift. So single steps are clipped, the number of
independent steps is estimated from the autocorrelation, and a drift is fitted together with the change. How much drift
there may be is known roughly before: what the windows cannot tell from the change adds to its error. Everything is a
pure function of step times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from statistics import NormalDist, median

from trimaran.core import robust_sigma

NORMAL = NormalDist()
MAX_DEVIATIONS = 3.0  # of a step from the median of its side, in robust standard deviations; further ones are clipped
MIN_SPREAD = 1e-4  # relative; step times are rounded to microseconds
MAX_AUTOCORRELATION = 0.95  # of neighbouring steps
MAX_LAG = 12  # steps over which autocorrelation is summed
USUAL_DRIFT = 1e-4  # relative, of step times in each step: the standard deviation over runs, assumed
Z_95 = NORMAL.inv_cdf(0.95)


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Step numbers and seconds of consecutive steps under one plan: the old one, or the changed one (`is_after`)."""

    is_after: bool
    steps: tuple[int, ...]
    seconds: tuple[float, ...]

    def first(self, count: int) -> "StepWindow":
        return StepWindow(self.is_after, self.steps[:count], self.seconds[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The steps with a change against those without it."""

    gain: float  # the fraction of a step that the change saves
    error: float  # standard error of the gain
    confidence: float  # the probability (one-sided) that steps are shorter with it
    step_seconds: float  # a typical step with it
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A typical step of a plan."""

    step_seconds: float  # the median
    spread: float  # relative standard deviation
    steps: int
    inflation: float = 1.0  # how many steps carry as much information as one independent step


@lru_cache(maxsize=8)  # that of a trial stays the same until its end
def baseline_of(seconds: tuple[float, ...]) -> Baseline:
    """Return what is typical of these steps. `seconds` must not be empty."""
    logs = [math.log(each) for each in seconds]
    low, high = _limits(logs)
    logs = [min(max(each, low), high) for each in logs]
    middle = sum(logs) / len(logs)
    residuals = [each - middle for each in logs]
    spread = math.sqrt(_dot(residuals, residuals) / max(1, len(logs) - 1))
    return Baseline(
        step_seconds=median(seconds), spread=max(MIN_SPREAD, spread), steps=len(logs), inflation=_inflation([residuals])
    )


@lru_cache(maxsize=8)  # a trial that waits for its next look asks for the same comparison again and again
def compare(windows: tuple[StepWindow, ...]) -> Comparison | None:
    """Return how steps with the change compare to those without it; None if one side has fewer than two steps.

    The drift of step times is fitted together with the change.
    """
    sides = {side: [each for window in windows if window.is_after == side for each in window.seconds]
             for side in (False, True)}  # fmt: skip
    if min(map(len, sides.values())) < 2:
        return None
    limits = {side: _limits([math.log(each) for each in seconds]) for side, seconds in sides.items()}
    logs = [[min(max(math.log(each), limits[window.is_after][0]), limits[window.is_after][1])
             for each in window.seconds] for window in windows]  # fmt: skip
    times = [[float(step) for step in window.steps] for window in windows]
    sign = [[-1.0 if window.is_after else 0.0 for _ in window.seconds] for window in windows]  # a gain is positive
    shorter, error, degrees = _regress(logs, sign, times)
    t = shorter / error
    # Student's distribution function by Wallace's approximation (error below 0.001 from 2 degrees of freedom on).
    scaled = (8 * degrees + 1) / (8 * degrees + 3) * math.sqrt(degrees * math.log1p(t * t / degrees))
    confidence = NORMAL.cdf(math.copysign(scaled, t))
    return Comparison(
        gain=1 - math.exp(-shorter),
        error=error * math.exp(-shorter),
        confidence=confidence,
        step_seconds=median(sides[True]),
        steps=len(sides[True]),
    )


def steps_to_show(gain: float, before: Baseline, *, confidence: float, power: float = 0.9) -> float:
    """Return how many steps with a change it takes to show a gain, against the steps of `before`; may be infinite."""
    shorter = -math.log1p(-min(gain, 0.9))
    if shorter <= 0:
        return math.inf
    needed = NORMAL.inv_cdf(confidence) + NORMAL.inv_cdf(power)
    left = (shorter / (needed * before.spread)) ** 2 / before.inflation - 1 / max(1, before.steps)
    return 1 / left if left > 0 else math.inf


def smallest_gain_to_show(before: Baseline, steps: float, *, confidence: float, power: float = 0.8) -> float:
    """Return the smallest gain that this many steps with a change can show."""
    needed = NORMAL.inv_cdf(confidence) + NORMAL.inv_cdf(power)
    error = before.spread * math.sqrt(before.inflation * (1 / max(1.0, steps) + 1 / max(1, before.steps)))
    return -math.expm1(-needed * error)


def _regress(
    logs: Sequence[Sequence[float]], changed: Sequence[Sequence[float]], times: Sequence[Sequence[float]]
) -> tuple[float, float, float]:
    """Return the effect of `changed` on `logs`, its standard error and its degrees of freedom."""
    # A drift along `times` is fitted, too. It is taken as normally distributed around none (`USUAL_DRIFT`), so that a
    # drift which cannot be told from the change makes the error larger, and does not hide a change which is.
    values, effect, trend = (_centred([each for window in part for each in window]) for part in (logs, changed, times))
    size, shared, length = _dot(effect, effect), _dot(effect, trend), _dot(trend, trend)
    effects, trends = _dot(values, effect), _dot(values, trend)

    def solve(stiffness: float) -> tuple[float, float, float]:
        """Return the effect, the drift, and the variance of the effect in units of a residual's."""
        rigid = length + stiffness
        determinant = size * rigid - shared * shared
        return ((effects * rigid - trends * shared) / determinant,
                (trends * size - effects * shared) / determinant, rigid / determinant)  # fmt: skip

    # Within windows, so that a change which is not fitted well does not look like noise.
    spread = [each for window in logs for each in _centred(window)]
    degrees_within = max(1, len(values) - len(logs))
    variance = max(_dot(spread, spread) / degrees_within, MIN_SPREAD**2)
    inflation = _inflation([_centred(window) for window in logs])
    shorter, drift, relative = solve(variance * inflation / USUAL_DRIFT**2)
    residuals = [value - shorter * each - drift * at for value, each, at in zip(values, effect, trend, strict=True)]
    split, start = [], 0
    for window in logs:
        split.append(residuals[start : start + len(window)])
        start += len(window)
    inflation = _inflation(split)
    degrees = max(1.0, len(values) / inflation - 3)
    variance = max(_dot(residuals, residuals) / max(1, len(values) - 3), MIN_SPREAD**2)
    return shorter, math.sqrt(variance * inflation * relative), degrees


def _inflation(windows: Sequence[Sequence[float]]) -> float:
    """Return how many residuals carry as much information as one independent one: 1 + 2 sum of autocorrelations."""
    # It is the larger of two estimates: from neighbours alone, as for noise with one time constant, and from all lags
    # up to the first that is not correlated. Outliers among slow noise make the first too small.
    count = sum(map(len, windows))
    square = sum(_dot(window, window) for window in windows)
    if count < 4 or not square:
        return 1.0
    total, first = 0.0, 0.0
    for lag in range(1, min(MAX_LAG, count // 4) + 1):
        pairs = sum(max(0, len(window) - lag) for window in windows)
        product = sum(_dot(window, window[lag:]) for window in windows)
        found = product / square * count / pairs if pairs else 0.0
        found += (1 + 3 * max(0.0, found)) / count  # estimates from few residuals are too small
        first = first or min(max(0.0, found), MAX_AUTOCORRELATION)
        if found <= 0:
            break
        total += found
    return max((1 + first) / (1 - first), 1 + 2 * total)


def _limits(logs: Sequence[float]) -> tuple[float, float]:
    middle = median(logs)
    deviation = max(MIN_SPREAD, robust_sigma(logs))
    return middle - MAX_DEVIATIONS * deviation, middle + MAX_DEVIATIONS * deviation


def _dot(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the sum of the products, up to the end of the shorter sequence."""
    return sum(map(mul, values, others))


def _centred(values: Sequence[float]) -> list[float]:
    middle = sum(values) / max(1, len(values))
    return [each - middle for each in values]
