"""Measures the seconds of a step by phase, without synchronising with the device."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch

from trimaran.core import DEVICE_TRAITS, WORLD, Phase
from trimaran.parallel import AXIS_WAITS, NO_SPAN


class PhaseEvent(NamedTuple):
    """A lap of a step, or a span inside a lap or inside another span. `start` and `end` are in seconds.

    phase: None for a discarded lap, and for a span that raised an error.
    axis: of the mesh, for which a phase `comm` communicates.
    depth: 0 for a lap, 1 for a span inside a lap, 2 for a span inside that span, and so on.
    stage: of the pipeline, for forward and backward of a pipeline stage.
    """

    phase: Phase | None
    start: float
    end: float
    axis: str = WORLD
    depth: int = 0
    stage: int | None = None


class StepSeconds(NamedTuple):
    """Seconds of a step by phase, of `comm` by axis, and of `stages` in a pipeline with the waits inside them."""

    phases: dict[str, float]
    comm: dict[str, float]
    stages: dict[int, float]


def attribute(events: Iterable[PhaseEvent]) -> StepSeconds:
    """Return the seconds of these events, which are in the order of their ends.

    An event counts without the spans inside it, so that laps add up to the step. A discarded lap does not count. The
    time of a span that raised counts for the event around it.
    """
    phases: dict[str, float] = defaultdict(float)
    comm: dict[str, float] = defaultdict(float)
    stages: dict[int, float] = defaultdict(float)
    inside: dict[int, float] = defaultdict(float)  # at each depth, the seconds of spans whose outer event is still open
    previous = 0
    for phase, start, end, axis, depth, stage in events:
        spans = inside.pop(depth + 1, 0.0) if depth < previous else 0.0  # the last one inside has just ended
        previous = depth
        if phase is None:
            inside[depth] += spans
            continue
        seconds = end - start
        inside[depth] += seconds
        phases[phase] += seconds - spans
        if phase == "comm":
            comm[axis] += seconds - spans
        if stage is not None and depth == 1:
            stages[stage] += seconds
    return StepSeconds(dict(phases), dict(comm), dict(stages))


ISSUED_PHASES = ("forward", "backward", "comm", "optimizer")  # the phases of `Stepper.step` and `Stepper.update`

NextPhase = Phase | Literal["evaluation"]  # evaluation is not part of a step
ReadEvents = Callable[[], Iterable[PhaseEvent]]
ReadSeconds = Callable[[], StepSeconds]
# An event as it is recorded: its phase, the marks at its start and end, its axis, depth and stage.
EventRecord = tuple[Phase | None, Any, Any, str, int, int | None]


class PhaseListener:
    """Receives the phases of a step on the host, as they begin and end. These methods do nothing."""

    def enter(self, phase: NextPhase) -> None:
        """A phase begins. Several laps of it may follow."""

    def end_lap(self, phase: Phase | None) -> None:
        """The running lap ends; None: it is discarded."""

    def begin_span(self, phase: Phase, axis: str, stage: int | None) -> None:
        """A span begins, on this thread."""

    def end_span(self, phase: Phase | None) -> None:
        """The innermost span ends; None: it has raised an error."""


class StartupTimer:
    """Measures the phases of a worker's start, which run once, one after another, in wall-clock seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        """End the running lap and add its time to `phase`."""
        before, self._last = self._last, time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._last - before


class HostTime(NamedTuple):
    """How long the host took to issue a step; `is_limit`: a GPU had to wait for it."""

    seconds: float
    is_limit: bool = False


NO_HOST_TIME = HostTime(0.0)


class StepClock:
    """Splits the time of a step into laps, each with a phase. The laps of a step add up to the step.

    `lap(phase)` ends the running lap. `end_step()` ends the step and returns a function that returns its seconds by
    phase. On a GPU, call that function one step later: by then the device has passed the marks, and nothing waits.
    Communication has an axis, too. `timed_axes` are those whose waits inside other phases are measured; None: all.
    """

    def __init__(self, device: torch.device, *, timed_axes: Sequence[str] | None = None) -> None:
        self._timed_axes = timed_axes
        self._listeners: tuple[PhaseListener, ...] = ()  # mostly none, and a loop over them would cost 4 % of a span
        self._cuda_events = CudaEvents() if DEVICE_TRAITS[device.type].runs_async else None
        self._mark: Callable[[], Any] = time.perf_counter if self._cuda_events is None else self._cuda_events.record
        self._depth = 0  # of the innermost open span
        self.restart()

    def listen(self, listener: PhaseListener) -> Callable[[], None]:
        """Tell the listener about phases from now on. Returns a function that ends this."""
        self._listeners = (*self._listeners, listener)

        def stop() -> None:
            self._listeners = tuple(each for each in self._listeners if each is not listener)

        return stop

    def restart(self) -> None:
        """Discard the laps of the running step, and start a new one now."""
        AXIS_WAITS.stop()
        self._begin_step(self._mark())
        self._lap_began = time.perf_counter()
        for each in self._listeners:
            each.end_lap(None)
        self.enter("data")

    def enter(self, phase: NextPhase) -> None:
        """Say which phase begins now, for listeners that need it at its start. It measures nothing."""
        for each in self._listeners:
            each.enter(phase)

    def lap(self, phase: Phase | None, axis: str = WORLD, *, then: Phase | None = None) -> None:
        """End the running lap: its time, without the spans inside it, counts for `phase`, and `axis` if it is `comm`.

        Without a phase the lap is discarded: it is not part of the step. `then` is the phase that begins, see `enter`.
        """
        AXIS_WAITS.stop()
        start, self._lap_start = self._lap_start, self._mark()
        self._records.append((phase, start, self._lap_start, axis, 0, None))
        now = time.perf_counter()
        if phase in ISSUED_PHASES:
            self._host_seconds += now - self._lap_began
        self._lap_began = now
        if self._listeners:
            for each in self._listeners:
                each.end_lap(phase)
        if then is not None:
            self.enter(then)

    def last_lap(self) -> ReadEvents:
        """Return a function that returns the events of the lap that has ended last. Call it as late as the clock's."""
        laps = [number for number, (*_, depth, _) in enumerate(self._records) if depth == 0]
        return self._reader(self._records[laps[-2] + 1 if len(laps) > 1 else 0 :])

    def span(self, phase: Phase, axis: str = WORLD, *, stage: int | None = None) -> AbstractContextManager[None]:
        """Return a context for a part of the lap that counts for another phase, without the spans inside it."""
        return _Span(self, phase, axis, stage)

    def time_waits(self) -> None:
        """Measure waits in collectives until the lap ends, as spans; also of gathers that recompute repeats."""
        AXIS_WAITS.start(self._wait)

    def _wait(self, axis: str) -> AbstractContextManager[None]:
        return NO_SPAN if self._timed_axes is not None and axis not in self._timed_axes else self.span("comm", axis)

    def begin_span(self, phase: Phase, axis: str, stage: int | None) -> Any:
        """Begin a span and return its first mark."""
        start = self._mark()
        self._depth += 1
        if self._listeners:
            for each in self._listeners:
                each.begin_span(phase, axis, stage)
        return start

    def end_span(self, phase: Phase | None, start: Any, axis: str, stage: int | None) -> None:
        """End the innermost span. One that raised has no phase, and no other mark: the device may have failed."""
        self._records.append((phase, start, start if phase is None else self._mark(), axis, self._depth, stage))
        self._depth -= 1
        if self._listeners:
            for each in self._listeners:
                each.end_span(phase)

    def host_time(self) -> HostTime:
        """Return how long the host took to issue the running step. Call it at the end of the step."""
        updates = [start for phase, start, *_ in self._records if phase == "optimizer"]
        if self._cuda_events is None or not updates:
            return HostTime(self._host_seconds)
        return HostTime(self._host_seconds, updates[-1].query())  # had it computed the gradients?

    def end_step(self) -> ReadSeconds:
        """End the step; return a function that returns its seconds by phase. Call it once."""
        read_events = self._reader(self._records)
        marks = self._begin_step(self._lap_start)

        def read() -> StepSeconds:
            seconds = attribute(read_events())
            if self._cuda_events is not None:
                self._cuda_events.give_back(marks[:-1])  # the last mark is the first of the next step
            return seconds

        return read

    def _begin_step(self, mark: Any) -> list[Any]:
        """Start a step at a mark, and return the CUDA events of the step before, which ends with it."""
        self._records: list[EventRecord] = []
        self._lap_start, self._host_seconds = mark, 0.0
        return [] if self._cuda_events is None else self._cuda_events.take(mark)

    def _reader(self, records: list[EventRecord]) -> ReadEvents:
        if self._cuda_events is None:
            return lambda: map(PhaseEvent._make, records)
        marks = [*self._cuda_events.recorded]

        def read() -> Iterator[PhaseEvent]:
            cuda_seconds(marks[0], marks[-1])  # waits once, for the last mark
            since_first = accumulate((cuda_seconds(*each) for each in pairwise(marks)), initial=0.0)
            times = dict(zip(marks, since_first, strict=True))
            for phase, start, end, axis, depth, stage in records:
                yield PhaseEvent(phase, times[start], times[end], axis, depth, stage)

        return read


class _Span:
    """A span of a lap. A generator would take three times as long, and a step may have a thousand spans."""

    __slots__ = ("_axis", "_clock", "_phase", "_stage", "_start")

    def __init__(self, clock: StepClock, phase: Phase, axis: str, stage: int | None) -> None:
        self._clock, self._phase, self._axis, self._stage = clock, phase, axis, stage

    def __enter__(self) -> None:
        self._start = self._clock.begin_span(self._phase, self._axis, self._stage)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.end_span(self._phase if kind is None else None, self._start, self._axis, self._stage)


class CudaEvents:
    """The events of a clock, used again: a step may have dozens. `recorded` has those of the running step."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []
        self._free: list[Any] = []
        self._given_back: list[Any] = []

    def record(self) -> torch.cuda.Event:
        """Return an event that the device passes after all work so far."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self.recorded.append(event)
        return event

    def take(self, last: Any) -> list[Any]:
        """Return the events recorded until the `last` one, with which the next step begins."""
        events, self.recorded = self.recorded, [last]
        while events[-1] is not last:
            events.pop()
        return events

    def give_back(self, events: list[Any]) -> None:
        """Use the events of a step again, from the next call on: what else is read of that step is read before it."""
        self._free += self._given_back
        self._given_back = events


def cuda_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    if not end.query():
        end.synchronize()  # lets other threads run, and then has to wait for them
    return start.elapsed_time(end) / 1000
