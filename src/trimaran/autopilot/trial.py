"""What to do next in a trial of a change: wait for more steps, take it back for a while, keep it, or roll it back.

A trial is a pure function of its decision, the steps and the changes so far. A controller that starts again in the
middle of a trial reads the same files and continues it.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Literal

from trimaran.autopilot.verdict import Z_95, Baseline, StepWindow, baseline_of, compare, steps_to_show
from trimaran.core import robust_sigma
from trimaran.runs import WARM_UP_STEPS, StepPlace

Move = Literal["wait", "apply", "undo", "keep", "roll back"]

CONFIDENCE = 0.95  # one-sided, that steps are shorter, over all looks at a trial together
MAX_LOOKS = 3  # each shares the remaining probability of an error
LOOK_CONFIDENCE = 1 - (1 - CONFIDENCE) / MAX_LOOKS
HARM_CONFIDENCE = 0.99  # that steps are longer, to roll back before the window is complete
MIN_WINDOW_STEPS = 6
MAX_WINDOW_STEPS = 320  # with the change, at the last look
MAX_STEPS_LEFT_FRACTION = 0.25  # of the steps that are left, for one trial
MIN_HARM_STEPS = 4
HARM_LOOKS = (4, 5, 6, 8, 10, 13, 16, 20, 26, 32, 40, 52, 64, 80, 104, 128, 160, 208, 256)  # steps of a window
MAX_BASELINE_STEPS = 320  # before the change
MAX_PAUSE_STEPS_TO_ALTERNATE = 2.0  # steps that a change may cost, to take it back and apply it again in a trial
MIN_USEFUL_GAIN = 0.01  # of a step: a change that cannot gain this much is rolled back early


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step: its seconds without and with what the checkpointer added, the peak memory, and when it was written."""

    step: int
    seconds: float
    seconds_with_checkpoint: float
    peak_bytes: float = 0.0
    time: float = 0.0

    def place(self) -> StepPlace:
        return StepPlace(self.step, self.time, self.seconds_with_checkpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedChange:
    """A change that the ranks made after `step`: to the tried plan (`is_after`) or back from it."""

    step: int
    is_after: bool
    pause_seconds: float = 0.0
    in_place: bool = False


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """The steps and changes of one trial, oldest first. There is at least one step before the first change."""

    samples: Sequence[TimedStep]
    changes: Sequence[AppliedChange]
    expected_gain: float  # what the trial looks for
    left_out: Sequence[TimedStep] = ()  # not compared, such as the first steps after a change: they count as its cost
    max_steps: int = MAX_WINDOW_STEPS  # with the change
    allowance: float = math.inf  # seconds that it may cost
    saves_memory: bool = False  # it is judged by the peak memory and not by time
    counts_checkpoints: bool = False  # steps are measured with their checkpoints

    def seconds(self, sample: TimedStep) -> float:
        return sample.seconds_with_checkpoint if self.counts_checkpoints else sample.seconds

    @cached_property
    def before(self) -> list[TimedStep]:
        """The steps before the first change."""
        end = bisect_right(self._steps, self.changes[0].step) if self.changes else len(self.samples)
        return list(self.samples[max(0, end - MAX_BASELINE_STEPS) : end])

    @cached_property
    def baseline(self) -> Baseline:
        return baseline_of(tuple(self.seconds(each) for each in self.before))

    @cached_property
    def windows(self) -> tuple[StepWindow, ...]:
        """The steps before the first change, and those after each one, without the first steps after it."""
        after = [
            self._window(change.is_after, self.after_change(index, settled=True))
            for index, change in enumerate(self.changes)
        ]
        return (self._window(False, self.before), *after)

    def after_change(self, index: int, *, settled: bool) -> list[TimedStep]:
        """Return the steps between a change and the next one; if `settled`, without the first ones."""
        change = self.changes[index]
        begin = bisect_right(self._steps, change.step + (WARM_UP_STEPS if settled else 0))
        is_last = index + 1 == len(self.changes)
        end = len(self.samples) if is_last else bisect_right(self._steps, self.changes[index + 1].step)
        return list(self.samples[begin:end])

    @cached_property
    def _steps(self) -> list[int]:
        return [each.step for each in self.samples]

    def _window(self, is_after: bool, samples: Sequence[TimedStep]) -> StepWindow:
        return StepWindow(is_after, tuple(each.step for each in samples), tuple(self.seconds(each) for each in samples))

    @property
    def num_after(self) -> int:
        """How many steps with the change count."""
        return sum(len(each.seconds) for each in self.windows if each.is_after)

    @cached_property
    def pause_seconds(self) -> float:
        """The pauses of all changes, and by how much the first steps after them exceeded a usual one."""
        usual, total = self.baseline.step_seconds, sum(each.pause_seconds for each in self.changes)
        for index, change in enumerate(self.changes):
            last = change.step + WARM_UP_STEPS
            if index + 1 < len(self.changes):
                last = min(last, self.changes[index + 1].step)
            first = [self.seconds(each) - usual for each in (*self.after_change(index, settled=False), *self.left_out)
                     if change.step < each.step <= last]  # fmt: skip
            total += max(0.0, sum(first))
        return total

    @property
    def lost_seconds(self) -> float:
        """What the trial has cost so far: pauses, and longer steps."""
        usual = self.baseline.step_seconds
        longer = sum(each - usual for window in self.windows if window.is_after for each in window.seconds)
        return self.pause_seconds + max(0.0, longer)


def next_move(trial: TrialRecord) -> Move:
    """Return what to do next in a trial."""
    # A change that is cheap to make alternates with the old plan: windows without, with, without and with it are
    # compared at once, so that a drift cancels. Any other change is applied once, and looked at after one, two and four
    # windows.
    if not trial.changes:
        return "apply"
    if trial.saves_memory:
        # Whether a change that should save memory did: its peak is below that of the steps before.
        peaks = [each.peak_bytes for each in trial.after_change(len(trial.changes) - 1, settled=False)]
        if len(peaks) < MIN_WINDOW_STEPS:
            return "wait"
        return "keep" if fmean(peaks) < fmean(each.peak_bytes for each in trial.before) else "roll back"
    is_after = trial.changes[-1].is_after
    if is_after and _harms(trial):
        return "roll back"
    *before, last = trial.windows
    # If the change is cheap enough, windows with and without it take turns.
    first = trial.changes[0]
    takes_turns = first.in_place and first.pause_seconds <= MAX_PAUSE_STEPS_TO_ALTERNATE * trial.baseline.step_seconds
    # The steps of one window, so that the expected gain can be shown at the first look.
    parts, gain = 2 if takes_turns else 1, max(trial.expected_gain, 2 * MIN_USEFUL_GAIN)
    needed = steps_to_show(gain, trial.baseline, confidence=LOOK_CONFIDENCE) / parts
    window = max(MIN_WINDOW_STEPS, math.ceil(min(needed, trial.max_steps / (2 * parts))))
    if takes_turns:
        if len(last.seconds) < window:
            return "wait"
        if not is_after:
            return "apply"
        looks = (len(trial.changes) - 1) // 2  # after three, five and seven changes
        if looks == 0:
            return "undo"
        comparison, otherwise = compare(trial.windows), "undo" if looks < MAX_LOOKS else "roll back"
    else:
        # Steps after the last look that is due do not count, so polling often is no harm.
        looks_at = sorted({min(window * 2**look, trial.max_steps) for look in range(MAX_LOOKS)})
        due = [each for each in looks_at if each <= trial.num_after]
        if not due:
            return "wait"
        comparison = compare((*before, last.first(due[-1])))
        otherwise = "roll back" if due[-1] == looks_at[-1] else "wait"
    if comparison is not None and comparison.confidence >= LOOK_CONFIDENCE:
        return "keep"
    # With a probability of 95 % the gain is not higher than this.
    if comparison is not None and comparison.gain + Z_95 * comparison.error < MIN_USEFUL_GAIN:
        return "roll back"
    return otherwise


def max_trial_steps(steps_left: float) -> int:
    return max(MIN_WINDOW_STEPS, int(min(MAX_WINDOW_STEPS, MAX_STEPS_LEFT_FRACTION * steps_left)))


def _harms(trial: TrialRecord) -> bool:
    """Return whether the change is clearly for the worse, or has cost all that it may."""
    if trial.lost_seconds > trial.allowance:
        return True
    after = [each for window in trial.windows if window.is_after for each in window.seconds]
    if len(after) < MIN_HARM_STEPS or median(after) <= trial.baseline.step_seconds:
        return False
    *before, last = trial.windows
    count = max((each for each in HARM_LOOKS if each <= len(last.seconds)), default=0)
    comparison = compare((*before, last.first(count)))
    return comparison is not None and comparison.confidence < 1 - HARM_CONFIDENCE


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
    """Return the shift in the last steps under one plan, if any; `known` is a step of it, used while there are few."""
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
    # The first step at the new speed.
    known_steps, middle = [*earlier, *recent], (before + after) / 2
    is_new = [(math.log(each.seconds) - middle) * (after - before) > 0 for each in known_steps]
    first = next(index for index in range(len(known_steps) - RECENT_STEPS, len(known_steps)) if is_new[index])
    while first > 0 and is_new[first - 1]:
        first -= 1
    return StepShift(step=known_steps[first].step, before=math.exp(before), after=math.exp(after))
