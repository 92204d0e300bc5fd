"""The steady steps of a run: what the doctor, the autopilot, `tune` and `history` compare and predict.

A step is warm if it is not one of the first `WARM_UP_STEPS` after a start or a change. A warm step is steady if nothing
was saved, evaluated, profiled or compiled beside it. If most steps are disturbed, as by checkpoints that are written
all the time, every warm step counts: they are typical then.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple, TypeVar

from trimaran.core import relative_error
from trimaran.runs.read.step_lines import StepLine, read_details
from trimaran.runs.record_types import is_number

T = TypeVar("T")

WARM_UP_STEPS = 5  # after each start: torch compiles, CUDA graphs are captured, allocators and caches fill
MIN_STEADY_STEPS = 5
MIN_UNDISTURBED_STEPS = 10  # with fewer, or with less than this fraction of all warm steps, disturbed ones count
MIN_UNDISTURBED_FRACTION = 0.25
# Events whose end they mark, `seconds` after their beginning: steps in between share disk and cores with them.
DISTURBING_EVENTS = ("checkpoint", "upload", "evaluation", "profile", "recompile", "sample", "loader")
MAX_SPANS = 4096  # of time that are remembered


class StepPlace(NamedTuple):
    """Where a step is in a run: its number, when its line was written, and its seconds."""

    step: int
    time: float
    seconds: float


class SteadyMarks:
    """Knows from the events of rank 0 which steps are warm and which were disturbed. Events come in order."""

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self._cold = set(range(1, WARM_UP_STEPS + 1))
        self._spans: deque[tuple[float, float]] = deque(maxlen=MAX_SPANS)  # (begin, end) of disturbances
        self._ends: list[float] | None = None
        self._begins: list[float] = []  # the earliest begin of each span and of all later ones
        for event in events:
            self.add(event)

    def add(self, event: Mapping[str, Any]) -> None:
        """Read an event. Those of other ranks are skipped."""
        kind, step, data, end = event.get("kind"), event.get("step"), event.get("data"), event.get("time")
        data = data if isinstance(data, dict) else {}
        if event.get("rank", 0) != 0:
            return
        if isinstance(step, int):
            if kind == "started":
                self.leave_out_after(step - 1)
            elif kind in ("ready", "resume") or (kind == "change" and data.get("status") == "applied"):
                self.leave_out_after(step)
        if kind in DISTURBING_EVENTS and is_number(end):
            seconds = data.get("seconds", 0.0)
            self._spans.append((end - max(0.0, seconds) if is_number(seconds) else end, end))
            self._ends = None

    def leave_out_after(self, step: int) -> None:
        """The ranks start again after `step`."""
        self._cold.update(range(step + 1, step + WARM_UP_STEPS + 1))

    def is_warm(self, step: int) -> bool:
        return step not in self._cold

    def is_disturbed(self, place: StepPlace) -> bool:
        """Return whether a disturbance overlaps the step, whose line is written up to one step after its end."""
        if self._ends is None:
            spans = sorted(self._spans, key=lambda span: span[1])
            self._ends = [end for _, end in spans]
            self._begins = list(accumulate((begin for begin, _ in reversed(spans)), min))[::-1]
        following = bisect_left(self._ends, place.time - 2 * place.seconds)
        return following < len(self._ends) and self._begins[following] <= place.time

    def steady(self, warm: Sequence[T], place: Callable[[T], StepPlace]) -> list[T]:
        """Return the undisturbed ones of `warm` steps; all of them if most are disturbed."""
        undisturbed = [each for each in warm if not self.is_disturbed(place(each))]
        enough = max(MIN_UNDISTURBED_STEPS, MIN_UNDISTURBED_FRACTION * len(warm))
        return undisturbed if len(undisturbed) >= enough else list(warm)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadySteps:
    """Medians of the steady steps of one plan.

    step_seconds: without the stall of checkpoints.
    busy_seconds: also without the wait for data, which no plan predicts.
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


def steady_ones(steps: Iterable[StepLine], marks: SteadyMarks) -> list[StepLine]:
    """Return the steady ones of `steps`."""
    warm = [step for step in steps if marks.is_warm(step.step) and 0 < step.step_seconds < math.inf and _busy(step) > 0]
    return marks.steady(warm, lambda step: StepPlace(step.step, step.time, step.step_seconds))


def steady_steps(steps: Iterable[StepLine], events: Iterable[Mapping[str, Any]]) -> SteadySteps | None:
    """Return the medians of the steady ones of `steps`; None if there are fewer than MIN_STEADY_STEPS."""
    found = steady_ones(steps, SteadyMarks(events))
    return median_step(found) if len(found) >= MIN_STEADY_STEPS else None


def seconds_without_stall(step: StepLine) -> float:
    """Return the seconds of a step without what checkpoints added."""
    return step.step_seconds - step.phases.get("checkpoint", 0.0)


def _busy(step: StepLine) -> float:
    return seconds_without_stall(step) - step.phases.get("data", 0.0)


def median_step(steps: Sequence[StepLine]) -> SteadySteps:
    """Return the medians of `steps`, of which there is at least one."""
    busy = [_busy(step) for step in steps]
    mfus = [step.mfu for step in steps if step.mfu > 0]
    return SteadySteps(
        num_steps=len(steps),
        step_seconds=median(map(seconds_without_stall, steps)),
        busy_seconds=median(busy),
        standard_error=relative_error(busy),
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
