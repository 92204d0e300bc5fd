"""Measures the seconds of a step by phase, without synchronising with the device."""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from itertools import chain, pairwise
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from trimaran.core.comm_axes import WORLD

COMM = "comm"
DISCARDED = "aside"  # the phase of laps that belong to no step
BETWEEN_SPANS = "?"  # the phase of time between the spans of a lap, until the end of the lap names it
ISSUED_PHASES = ("forward", "backward", "comm", "optimizer")  # the phases of `Stepper.step` and `Stepper.update`

LapCallback = Callable[..., None]  # called on the host at the end of a lap or span, with its phase and `gaps`


class PhaseRanges(Protocol):
    """Ranges for a tool that needs the name of a phase at its start, see `nvtx_ranges.py`."""

    def enter(self, phase: str) -> None: ...

    def push(self, text: str) -> None: ...

    def pop(self) -> None: ...


class StepSeconds(NamedTuple):
    """The seconds of a step by phase, and those of the phase `comm` by the axis that they are for."""

    phases: dict[str, float]
    comm: dict[str, float]


ReadSeconds = Callable[[], StepSeconds]


def _key(phase: str, axis: str) -> str:
    return f"{phase}/{axis}" if axis else phase


def _phase(key: str) -> str:
    return key.partition("/")[0]


class SpanTimer:
    """Measures spans inside a lap, by phase, for phases that alternate too often to be laps.

    A span may contain others, whose time is then theirs alone. Read it as late as the clock: on a GPU, one step later.
    """

    def __init__(
        self,
        mark: Callable[[], object],
        between: Callable[..., float],
        on_lap: LapCallback | None = None,
        ranges: PhaseRanges | None = None,
    ) -> None:
        self._mark, self._between, self._on_lap, self._ranges = mark, between, on_lap, ranges
        self._open: list[str] = []
        self._spans: list[tuple[str, str | None, object, object]] = []  # key, that of the outer span, start, end

    def span(self, phase: str, axis: str = "") -> AbstractContextManager[None]:
        """Return a context manager that adds its time to `phase`, and to `axis`: of a mesh if the phase is `comm`."""
        return _Span(self, _key(phase, axis))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all spans, by phase and axis."""
        seconds: dict[str, float] = {}
        for key, outer, start, end in self._spans:
            span = self._between(start, end)
            seconds[key] = seconds.get(key, 0.0) + span
            if outer is not None:
                seconds[outer] = seconds.get(outer, 0.0) - span
        return seconds

    def outer_seconds_by_axis(self, phases: Collection[str]) -> dict[str, float]:
        """Return the seconds of the spans of these phases, with the spans inside them, by the axis of each.

        The axis of a span that is not communication is the number of its pipeline stage.
        """
        seconds: dict[str, float] = {}
        for key, outer, start, end in self._spans:
            phase, _, axis = key.partition("/")
            if outer is None and phase in phases:
                seconds[axis] = seconds.get(axis, 0.0) + self._between(start, end)
        return seconds

    @property
    def marks(self) -> list[object]:
        """The marks of all spans."""
        return [mark for _, _, *marks in self._spans for mark in marks]

    def begin(self, key: str) -> object:
        """Begin a span and return its start."""
        start = self._mark()
        if self._on_lap is not None:
            self._on_lap(_phase(self._open[-1]) if self._open else BETWEEN_SPANS)
        self._open.append(key)
        if self._ranges is not None:
            self._ranges.push(key.replace("/", " "))
        return start

    def end(self, key: str, start: object, *, failed: bool) -> None:
        """End a span. One that raised is not measured."""
        self._open.pop()
        if self._ranges is not None:
            self._ranges.pop()
        if failed:
            return
        self._spans.append((key, self._open[-1] if self._open else None, start, self._mark()))
        if self._on_lap is not None:
            self._on_lap(_phase(key))


class _Span:
    """A span of a timer. A generator would take three times as long, and a step may have a thousand spans."""

    __slots__ = ("_key", "_start", "_timer")

    def __init__(self, timer: SpanTimer, key: str) -> None:
        self._timer, self._key = timer, key

    def __enter__(self) -> None:
        self._start = self._timer.begin(self._key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.end(self._key, self._start, failed=kind is not None)


class StartupTimer:
    """Measures the phases of a worker's start, which run once, one after another, in wall-clock seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        """End the running lap and add its time to `phase`."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


LapEnd = tuple[str, object, SpanTimer | None]  # phase and axis of a lap, the mark at its end, the spans inside it


class HostTime(NamedTuple):
    """How long the host took to issue a step: forward, backward, communication and update.

    is_limit: a GPU had computed the gradients of the step before the host was ready to issue the next one.
    """

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
        self.timed_axes = timed_axes
        self.on_lap: LapCallback | None = None  # set only while a trace is recorded
        self.ranges: PhaseRanges | None = None  # set only while NVTX ranges are on
        self._mark: Callable[[], object] = time.perf_counter
        self._between: Callable[..., float] = lambda start, end: end - start
        self._events = CudaEvents() if device.type == "cuda" else None
        if self._events is not None:
            self._mark, self._between = self._events.record, cuda_seconds
        self.restart()

    def restart(self) -> None:
        """Discard the laps of the running step, and start a new one now."""
        self._laps: list[LapEnd] = [("", self._mark(), None)]
        self._host_seconds, self._lap_began = 0.0, time.perf_counter()
        if self.on_lap is not None:
            self.on_lap("")
        self.enter("data")

    def enter(self, phase: str) -> None:
        """Say which phase begins now, for tools that need it at its start. It measures nothing."""
        if self.ranges is not None:
            self.ranges.enter(phase)

    def lap(self, phase: str, axis: str = "", *, then: str = "") -> None:
        """End the running lap and add its time to `phase`, and to `axis` if the phase is `comm`.

        `then` is the phase that begins, see `enter`.
        """
        self._laps.append((_key(phase, axis), self._mark(), None))
        self._count_host_seconds(phase)
        if self.on_lap is not None:
            self.on_lap(phase)
        if then:
            self.enter(then)

    def discard_lap(self) -> None:
        """End the running lap without adding its time to the step."""
        self.lap(DISCARDED)

    def span_timer(self) -> SpanTimer:
        """Return a timer for spans of the running lap; end the lap with `split_lap`."""
        return SpanTimer(self._mark, self._between, self.on_lap, self.ranges)

    def split_lap(self, spans: SpanTimer, *, rest: str, axis: str = "") -> Callable[[], float]:
        """End the running lap: each phase gets its spans, and `rest` gets the remaining time, with its `axis`.

        Returns a function that returns the remaining seconds.
        """
        start, end = self._laps[-1][1], self._mark()
        self._laps.append((_key(rest, axis), end, spans))
        self._count_host_seconds(rest)
        if self.on_lap is not None:
            self.on_lap(rest, gaps=True)
        return lambda: self._between(start, end) - sum(spans.seconds().values())

    def _count_host_seconds(self, phase: str) -> None:
        now = time.perf_counter()
        if phase in ISSUED_PHASES:
            self._host_seconds += now - self._lap_began
        self._lap_began = now

    def host_time(self) -> HostTime:
        """Return how long the host took to issue the running step. Call it at the end of the step."""
        updates = [index for index, (phase, *_) in enumerate(self._laps) if phase == "optimizer"]
        if self._events is None or not updates:
            return HostTime(self._host_seconds)
        gradients: Any = self._laps[updates[-1] - 1][1]  # the mark before the update
        return HostTime(self._host_seconds, gradients.query())

    def end_step(self) -> ReadSeconds:
        """End the step; return a function that returns its seconds by phase. Call it once."""
        laps = self._laps
        self._laps = [("", laps[-1][1], None)]
        self._host_seconds = 0.0

        def read() -> StepSeconds:
            seconds: dict[str, float] = {}
            self._between(laps[0][1], laps[-1][1])  # waits once, for the last mark
            for (_, start, _), (key, end, spans) in pairwise(laps):
                remaining = self._between(start, end)
                for span_key, span_seconds in (spans.seconds() if spans else {}).items():
                    seconds[span_key] = seconds.get(span_key, 0.0) + span_seconds
                    remaining -= span_seconds
                seconds[key] = seconds.get(key, 0.0) + remaining
            seconds.pop(DISCARDED, None)
            if self._events is not None:  # the last mark is the first of the next step
                self._events.give_back(
                    [mark for _, mark, _ in laps[:-1]], *(spans.marks for *_, spans in laps if spans)
                )
            return _by_phase(seconds)

        return read


def _by_phase(by_key: dict[str, float]) -> StepSeconds:
    """Return the seconds by phase, and those of `comm` by axis. What has no axis is for all ranks."""
    seconds = StepSeconds({}, {})
    for key, value in by_key.items():
        phase, _, axis = key.partition("/")
        seconds.phases[phase] = seconds.phases.get(phase, 0.0) + value
        if phase == COMM:
            seconds.comm[axis or WORLD] = seconds.comm.get(axis or WORLD, 0.0) + value
    return seconds


class CudaEvents:
    """The events of a clock, which are used again: a step has dozens with a pipeline or FSDP."""

    def __init__(self) -> None:
        self._free: list[Any] = []
        self._given_back: list[Any] = []

    def record(self) -> torch.cuda.Event:
        """Return an event that the device passes after all work so far."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def give_back(self, *events: list[Any]) -> None:
        """Use the events of a step again, from the next call on: what else is read of that step is read before it."""
        self._free += self._given_back
        self._given_back = [*chain(*events)]


def cuda_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    if not end.query():
        end.synchronize()  # lets other threads run, and then has to wait for them
    return start.elapsed_time(end) / 1000
