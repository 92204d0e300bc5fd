"""Where the time of a step goes, without stopping the device to look."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

Reading = Callable[[], dict[str, float]]
ASIDE = "aside"  # a lap that no step takes
GAP = "?"  # what lies between the phases that a stopwatch sees; the end of the lap says what that was

Watcher = Callable[..., None]  # is told by the host when a lap, or a part of one, ends: its phase, and `gaps`


class Stopwatch:
    """Time inside a lap, by phase, where the phases take turns too often to be laps. Read it as late as the clock."""

    def __init__(
        self, mark: Callable[[], object], between: Callable[..., float], watcher: Watcher | None = None
    ) -> None:
        self._mark, self._between, self._watcher = mark, between, watcher
        self._spans: list[tuple[str, object, object]] = []

    @contextmanager
    def run(self, phase: str) -> Iterator[None]:
        start = self._mark()
        if self._watcher is not None:
            self._watcher(GAP)
        yield
        self._spans.append((phase, start, self._mark()))
        if self._watcher is not None:
            self._watcher(phase)

    def phases(self) -> dict[str, float]:
        phases: dict[str, float] = {}
        for phase, start, end in self._spans:
            phases[phase] = phases.get(phase, 0.0) + self._between(start, end)
        return phases


class Laps:
    """Seconds by the host's clock of what happens once, phase after phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        """End the running lap, which `phase` gets."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


Mark = tuple[str, object, Stopwatch | None]  # the end of a lap: its phase, when, and what was seen inside of it


class Clock:
    """Splits time into laps, each named for a phase; the laps of a step add up to the step.

    `lap(phase)` ends the running lap. `read()` closes the step and returns a function that gives its seconds by phase;
    on a GPU call that function a step later, when the device has passed the marks anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.watcher: Watcher | None = None  # only while a profile is made
        self._mark: Callable[[], object] = time.perf_counter
        self._between: Callable[..., float] = lambda start, end: end - start
        if device.type == "cuda":
            self._mark, self._between = _cuda_mark, _cuda_seconds
        self.restart()

    def restart(self) -> None:
        """Forget the time since the last lap: it belongs to no step."""
        self._marks: list[Mark] = [("", self._mark(), None)]
        if self.watcher is not None:
            self.watcher("")

    def lap(self, phase: str) -> None:
        self._marks.append((phase, self._mark(), None))
        if self.watcher is not None:
            self.watcher(phase)

    def aside(self) -> None:
        """End the running lap, which belongs to no step."""
        self.lap(ASIDE)

    def stopwatch(self) -> Stopwatch:
        """Return a watch for the lap that runs now; end the lap with `split`."""
        return Stopwatch(self._mark, self._between, self.watcher)

    def split(self, watch: Stopwatch, *, rest: str) -> Callable[[], float]:
        """End the running lap: each phase gets what the watch saw of it, and `rest` the rest, whose seconds return."""
        start, end = self._marks[-1][1], self._mark()
        self._marks.append((rest, end, watch))
        if self.watcher is not None:
            self.watcher(rest, gaps=True)
        return lambda: self._between(start, end) - sum(watch.phases().values())

    def read(self) -> Reading:
        marks = self._marks
        self._marks = [("", marks[-1][1], None)]

        def seconds() -> dict[str, float]:
            phases: dict[str, float] = {}
            for (_, start, _), (phase, end, watch) in pairwise(marks):
                left = self._between(start, end)
                for seen, part in (watch.phases() if watch else {}).items():
                    phases[seen] = phases.get(seen, 0.0) + part
                    left -= part
                phases[phase] = phases.get(phase, 0.0) + left
            phases.pop(ASIDE, None)
            return phases

        return seconds


def _cuda_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _cuda_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return start.elapsed_time(end) / 1000
