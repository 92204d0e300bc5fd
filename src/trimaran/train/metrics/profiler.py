"""Records traces and memory snapshots of steps, on request. Without a request it costs one `exists` per step.

A request comes from the recipe (`telemetry.profile`) or from a file in the run directory (`trimaran profile RUN`). Rank
0 checks for the file. The request is all-reduced with the counts of a step, so that all ranks start at the same step.

With `telemetry.nvtx` the recipe's steps are not traced: they have NVTX ranges, and a tool outside records them.
"""

import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from trimaran.core import DEVICE_TRAITS, Phase, TelemetrySection
from trimaran.nets import Network
from trimaran.runs import (
    RECIPE_ID,
    Journal,
    ProfileRequest,
    RunDirectory,
    read_request,
    recipe_request,
    request_file,
    says_out_of_memory,
    snapshot_file,
    trace_file,
    withdraw_request,
)
from trimaran.train.metrics.step_clock import PhaseListener, StepClock
from trimaran.train.process.supervisor_link import NO_SUPERVISOR, SupervisorLink

if TYPE_CHECKING:
    from trimaran.train.metrics.memory_snapshot import MemorySnapshotter
    from trimaran.train.metrics.nvtx_ranges import StepRanges

log = logging.getLogger(__name__)

MAX_REPEATED_TRACES = 10  # of `telemetry.profile_every`, on each rank


class TracedInterval(NamedTuple):
    """Time of a step that belongs to one phase, in nanoseconds since the epoch."""

    step: int
    phase: Phase
    start: int
    end: int


class TracedPhases(PhaseListener):
    """Listens to a clock. Its `intervals` do not overlap: a span is not part of what contains it."""

    def __init__(self, step: Callable[[], int]) -> None:
        self.intervals: list[TracedInterval] = []
        self._step, self._since = step, time.time_ns()
        self._open: list[Phase] = []
        self._lap: list[tuple[Phase | None, int, int]] = []  # None: between spans, where the phase is the lap's

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recording of the steps `first` to `last`: a `trace`, memory (`snapshotter`), `ranges`, or nothing here."""

    request: ProfileRequest
    first: int
    last: int
    trace: profile | None = None
    phases: Sequence[TracedInterval] = ()  # those of the trace
    snapshotter: "MemorySnapshotter | None" = None
    ranges: "StepRanges | None" = None


class Profiler:
    """Makes one recording at a time on this rank. Every rank calls `between_steps` between the same two steps."""

    def __init__(
        self,
        run: RunDirectory,
        telemetry: TelemetrySection,
        journal: Journal,
        clock: StepClock,
        networks: Sequence[Network],
        device: torch.device,
        link: SupervisorLink = NO_SUPERVISOR,
    ) -> None:
        self._run, self._journal, self._clock, self._device, self._link = run, journal, clock, device, link
        self._keeps_history = telemetry.memory_snapshots
        self._planned, self._every = recipe_request(telemetry.profile, telemetry.profile_ranks), telemetry.profile_every
        self._repeated: list[Path] = []  # traces that the recipe asks for again and again; writers change it
        self._repeated_lock = threading.Lock()
        self._file = os.fspath(request_file(run))
        self._served_id = ""
        self._recording: Recording | None = None
        self._listening, self.step = ExitStack(), 0
        self._ranges = None
        if telemetry.nvtx:
            from trimaran.train.metrics.nvtx_ranges import StepRanges  # noqa: PLC0415  few runs have NVTX ranges

            self._ranges = StepRanges(clock)
        self._ranges_in_all_steps = telemetry.nvtx and not telemetry.profile
        self._writers: list[threading.Thread] = []
        self.follow(networks)

    @cached_property
    def snapshotter(self) -> "MemorySnapshotter":
        """What writes memory snapshots of this rank."""
        from trimaran.train.metrics.memory_snapshot import MemorySnapshotter  # noqa: PLC0415  most runs write none

        return MemorySnapshotter(lambda: self._modules, self._device, history=self._keeps_history)

    def follow(self, networks: Sequence[Network]) -> None:
        """Record these networks from now on: the plan has changed."""
        self._modules = tuple(each.module for each in networks)
        if self._ranges is not None:
            self._ranges.follow(networks)

    @property
    def is_requested(self) -> bool:
        """Whether the request file exists. Only rank 0 checks."""
        return self._journal.rank == 0 and self._recording is None and os.path.exists(self._file)

    def between_steps(self, done: int, *, requested: bool = False) -> None:
        """End and start recordings after step `done`, outside of step times. `requested`: the ranks agreed to."""
        self.step = done + 1
        recording = self._recording
        is_over = recording is not None and done >= recording.last
        if self._ranges is not None and not is_over:
            self._ranges.begin_step(done + 1)
        if recording is None and not requested and self._planned is None:
            return
        if is_over:
            self._end(done)
        # A request that arrives as a recording ends is the one that started it: rank 0 sent it for two steps.
        is_new = requested and not is_over
        if self._recording is None and (request := self._next_request(done, requested=is_new)) is not None:
            nothing = Recording(request=request, first=done + 1, last=done + request.steps)
            self._recording = nothing
            if request.is_for(self._journal.rank):
                try:
                    with self._link.section("profile", done):  # profilers take seconds
                        self._recording = self._started(nothing)
                except Exception as error:  # a failed profile must not stop training
                    self._write_failure_event(error)
        elif not is_over:
            return
        self._clock.restart()

    @contextmanager
    def active(self, start: int) -> Iterator[None]:
        """Record requests in this context, from the first step after `start` on; at its end, wait for all writes.

        On an out-of-memory error, write a memory snapshot. On any error, the current recording is lost.
        """
        self.between_steps(start)
        if self._ranges is not None and self._ranges_in_all_steps:
            self._ranges.install(start + 1)
        try:
            yield
        except Exception as error:
            self._listening.close()
            if self._ranges is not None:
                self._ranges.remove()
            if is_out_of_memory(error):
                path = snapshot_file(self._run, step=self.step, rank=self._journal.rank)
                try:
                    if not path.exists():
                        self.snapshotter.write(path, step=self.step, oom={"message": str(error)[:500]})
                    where = str(path.relative_to(self._run.path))
                    self._journal.event("profile", step=self.step, what="memory", path=where, request="oom")
                except Exception as write_error:
                    log.warning("the memory snapshot could not be written: %s", write_error)
            raise
        if self._recording is not None:
            self._end(self.step - 1)
        if self._ranges is not None:
            self._ranges.remove()
        if self._writers:
            with self._link.section("profile"):
                for each in self._writers:
                    each.join()
            self._writers.clear()

    def _next_request(self, done: int, *, requested: bool) -> ProfileRequest | None:
        """Return the request of the recording that starts with the next step; None without one."""
        planned = self._planned.from_step(done + 1, every=self._every) if self._planned is not None else None
        if planned is None:
            self._planned = None  # it is over
        elif planned.first == done + 1:
            return planned
        request = read_request(self._run) if requested else None
        if request is None or request.id == self._served_id:
            if requested and request is None and self._journal.rank == 0:
                # Remove a request that cannot be read. Otherwise rank 0 would request it at every step.
                try:
                    Path(self._file).unlink(missing_ok=True)
                except OSError as error:
                    self._write_failure_event(error)
            return None
        self._served_id = request.id
        return request

    def _started(self, nothing: Recording) -> Recording:
        if self._ranges is not None and nothing.request.id == RECIPE_ID:
            self._ranges.start_capture(self._device)
            self._ranges.install(nothing.first)
            return replace(nothing, ranges=self._ranges)
        if nothing.request.memory:
            self.snapshotter.begin()
            return replace(nothing, snapshotter=self.snapshotter)
        activities = [ProfilerActivity.CPU]
        if DEVICE_TRAITS[self._device.type].runs_async:
            activities.append(ProfilerActivity.CUDA)
        trace, phases = profile(activities=activities), TracedPhases(lambda: self.step)
        trace.start()
        self._listening.callback(self._clock.listen(phases))
        return replace(nothing, trace=trace, phases=phases.intervals)

    def _end(self, done: int) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None
        self._listening.close()
        try:
            with self._link.section("profile", done):
                if recording.ranges is not None:
                    recording.ranges.remove()
                    recording.ranges.stop_capture(self._device)
                    facts = {"what": "nvtx", "first": recording.first, "last": done, "request": recording.request.id}
                    self._journal.event("profile", step=done, **facts)
                elif recording.trace is not None:
                    about = {
                        "rank": self._journal.rank,
                        "world_size": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
                        "host": platform.node(),
                        "device": str(self._device),
                        "steps": [recording.first, done],
                        "phases": recording.phases,
                    }
                    recording.trace.add_metadata_json("trimaran", json.dumps(about))
                    recording.trace.stop()
                    path = trace_file(self._run, step=recording.first, rank=self._journal.rank)
                    task = recording, recording.trace, path, done
                    writer = threading.Thread(target=self._write, args=task, name="trimaran-trace")
                    writer.start()
                    self._writers.append(writer)
                elif recording.snapshotter is not None:
                    path = snapshot_file(self._run, step=recording.first, rank=self._journal.rank)
                    self.snapshotter.end(path, step=done)
                    self._write_event(recording, path, done)
        except Exception as error:
            self._write_failure_event(error)
        if self._journal.rank == 0:  # all ranks have read the request, before the first step of this recording
            withdraw_request(self._run, recording.request.id)

    def _write(self, recording: Recording, trace: profile, path: Path, done: int) -> None:
        """Write the trace in a thread while training continues: compressing it may take seconds."""
        temporary = path.with_name(f".{path.name}")  # torch compresses if the name ends in .gz
        try:
            path.parent.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(temporary))
            temporary.replace(path)
            self._write_event(recording, path, done)
            if self._every and recording.request.id == RECIPE_ID:
                # Keep only the newest of the traces that are repeated: a run of weeks would fill the disk.
                with self._repeated_lock:
                    self._repeated = sorted([*self._repeated, path])  # by step
                    for each in self._repeated[:-MAX_REPEATED_TRACES]:
                        each.unlink(missing_ok=True)
                    del self._repeated[:-MAX_REPEATED_TRACES]
        except Exception as error:
            self._write_failure_event(error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)  # free the space if the disk is full

    def _write_event(self, recording: Recording, path: Path, done: int) -> None:
        what = "memory" if recording.request.memory else "trace"
        where = str(path.relative_to(self._run.path))
        facts = {"what": what, "path": where, "first": recording.first, "last": done, "request": recording.request.id}
        self._journal.event("profile", step=done, **facts)

    def _write_failure_event(self, error: Exception) -> None:
        log.warning("the profile could not be recorded: %s", error)
        self._journal.event("profile", step=self.step, what="failed", message=str(error), request=self._served_id)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on the device or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or says_out_of_memory(str(error))
