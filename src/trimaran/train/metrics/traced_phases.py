"""Records the phases of traced steps on the host, for the file of the trace."""

import time
from collections.abc import Callable
from typing import NamedTuple

from trimaran.core import Phase
from trimaran.train.metrics.step_clock import NextPhase


class TracedInterval(NamedTuple):
    """Time of a step that belongs to one phase, in nanoseconds since the epoch."""

    step: int
    phase: Phase
    start: int
    end: int


class TracedPhases:
    """Listens to a clock. Its `intervals` do not overlap: a span is not part of what contains it."""

    def __init__(self, step: Callable[[], int]) -> None:
        self.intervals: list[TracedInterval] = []
        self._step, self._since = step, time.time_ns()
        self._open: list[Phase] = []
        self._lap: list[tuple[Phase | None, int, int]] = []  # None: between spans, where the phase is the lap's

    def enter(self, phase: NextPhase) -> None:
        """Do nothing: a phase is recorded when it ends."""

    def begin_span(self, phase: Phase, axis: str, stage: int | None) -> None:
        self._end_interval(self._open[-1] if self._open else None)
        self._open.append(phase)

    def end_span(self, phase: Phase | None) -> None:
        self._open.pop()
        if phase is not None:
            self._end_interval(phase)

    def end_lap(self, phase: Phase | None) -> None:
        self._end_interval(None)
        named = ((seen or phase, start, end) for seen, start, end in self._lap)
        self.intervals += [TracedInterval(self._step(), each, a, b) for each, a, b in named if each is not None]
        self._lap = []

    def _end_interval(self, phase: Phase | None) -> None:
        start, self._since = self._since, time.time_ns()
        self._lap.append((phase, start, self._since))
