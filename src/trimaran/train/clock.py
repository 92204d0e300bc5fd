"""Where the time of a step goes, without stopping the device to look."""

import time
from collections.abc import Callable
from itertools import pairwise

import torch

Reading = Callable[[], dict[str, float]]


class Clock:
    """Splits time into laps, each named for a phase; the laps of a step add up to the step.

    `lap(phase)` ends the running lap. `read()` closes the step and returns a function that gives its seconds by phase;
    on a GPU call that function a step later, when the device has passed the marks anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], object] = time.perf_counter
        self._between: Callable[..., float] = lambda start, end: end - start
        if device.type == "cuda":
            self._mark, self._between = _cuda_mark, _cuda_seconds
        self.restart()

    def restart(self) -> None:
        """Forget the time since the last lap: it belongs to no step."""
        self._marks: list[tuple[str, object]] = [("", self._mark())]

    def lap(self, phase: str) -> None:
        self._marks.append((phase, self._mark()))

    def read(self) -> Reading:
        marks, self._marks = self._marks, [("", self._marks[-1][1])]

        def seconds() -> dict[str, float]:
            phases: dict[str, float] = {}
            for (_, start), (phase, end) in pairwise(marks):
                phases[phase] = phases.get(phase, 0.0) + self._between(start, end)
            return phases

        return seconds


def _cuda_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _cuda_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return start.elapsed_time(end) / 1000
