"""Traces of steps and images of memory, for whoever asks. While nobody does, a look at one file name a step.

Who asks is the recipe (`telemetry.profile`) or a file in the run directory (`trimaran profile RUN`). Rank 0 looks for
the file; the wish travels with the step's counts like all others, so that every rank begins with the same step.
"""

import json
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trimaran.core import TelemetrySection
from trimaran.nets import Network
from trimaran.run import Journal, RunDirectory
from trimaran.run.profile_request import (
    ProfileRequest,
    read_request,
    recipe_request,
    request_file,
    snapshot_file,
    trace_file,
    withdraw_request,
)
from trimaran.train.metrics.memory_snapshot import Photographer, is_out_of_memory, photograph_oom
from trimaran.train.metrics.step_clock import GAP, Clock
from trimaran.train.process.supervisor_link import NO_SUPERVISOR, SupervisorLink

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Recording:
    """What is being recorded: from step `first` to step `last`. `trace` is None where memory is, or nothing here."""

    request: ProfileRequest
    first: int
    last: int
    trace: profile | None = None
    photographer: Photographer | None = None


class Profiler:
    """One rank's recordings, one at a time. Every rank calls `turn` between the same two steps."""

    def __init__(
        self,
        run: RunDirectory,
        telemetry: TelemetrySection,
        journal: Journal,
        clock: Clock,
        photographer: Photographer,
        link: SupervisorLink = NO_SUPERVISOR,
    ) -> None:
        self._run, self._journal, self._clock, self._photographer, self._link = run, journal, clock, photographer, link
        self._named = recipe_request(telemetry.profile, telemetry.profile_ranks)
        self._file = os.fspath(request_file(run))
        self._served = ""
        self._recording: Recording | None = None
        self._spans: list[tuple[int, str, int, int]] = []  # step, phase, from, until: nanoseconds since the epoch
        self._step = self._since = 0
        self._writers: list[threading.Thread] = []

    @property
    def step(self) -> int:
        """The step at hand."""
        return self._step

    @property
    def is_asked(self) -> bool:
        """Whether somebody asks; only rank 0 looks."""
        return self._journal.rank == 0 and self._recording is None and os.path.exists(self._file)

    def turn(self, done: int, *, asked: bool = False) -> None:
        """End and begin what ends and begins between step `done` and the next; `asked` if all ranks agreed on it.

        The time that it takes belongs to no step.
        """
        self._step = done + 1
        recording = self._recording
        if recording is None and not asked and self._named is None:
            return
        is_over = recording is not None and done >= recording.last
        if is_over:
            self._end(done)
        # A wish that arrives as a recording ends is the one that began it, on its way twice.
        is_new = asked and not is_over
        if self._recording is None and (request := self._due(done, asked=is_new)) is not None:
            self._begin(request, done)
        elif not is_over:
            return
        self._clock.restart()

    @contextmanager
    def watch(self, start: int) -> Iterator[None]:
        """Begin what begins with the first step after `start`; at the end, wait until all is written.

        When memory runs out, who holds it is written down. What was being recorded when something failed is lost.
        """
        self.turn(start)
        try:
            yield
        except Exception as error:
            self._clock.watcher = None
            if is_out_of_memory(error):
                self._photograph(error)
            raise
        if self._recording is not None:
            self._end(self._step - 1)
        for each in self._writers:
            each.join()
        self._writers.clear()

    def _photograph(self, error: Exception) -> None:
        """Leave an image of the memory that ran out; of a GPU's there is one already, see `photograph_oom`."""
        path = snapshot_file(self._run, step=self._step, rank=self._journal.rank)
        try:
            if not path.exists():
                self._photographer.write(path, step=self._step, oom={"message": str(error)[:500]})
            where = str(path.relative_to(self._run.path))
            self._journal.event("profile", step=self._step, what="memory", path=where, request="oom")
        except Exception as trouble:
            log.warning("what holds the memory could not be written: %s", trouble)

    def _due(self, done: int, *, asked: bool) -> ProfileRequest | None:
        """Return what begins with the next step."""
        named = self._named
        if named is not None and named.first <= done + 1:
            self._named = None
            if left := max(0, named.first + named.steps - (done + 1)):
                return ProfileRequest(first=done + 1, steps=left, ranks=named.ranks, id=named.id)
        request = read_request(self._run) if asked else None
        if request is None or request.id == self._served:
            if asked and request is None and self._journal.rank == 0:
                self._forget_nonsense()
            return None
        self._served = request.id
        return request

    def _begin(self, request: ProfileRequest, done: int) -> None:
        recording = Recording(request=request, first=done + 1, last=done + request.steps)
        self._recording = recording
        self._link.enter("evaluation", done)  # a section that may take long: a profiler starts, or writes, for seconds
        if not request.is_for(self._journal.rank):
            return
        try:
            if request.memory:
                self._photographer.begin()
                recording.photographer = self._photographer
            else:
                recording.trace = _start_trace(self._photographer.device)
                self._spans, self._since = [], time.time_ns()
                self._clock.watcher = self._note
        except Exception as error:  # whatever a profiler cannot do is no reason to stop training
            self._complain(error)

    def _note(self, phase: str, *, gaps: bool = False) -> None:
        """Take down that a lap has ended now; with `gaps` those before it were of the same phase."""
        now = time.time_ns()
        if gaps:
            self._spans = [(step, phase if seen == GAP else seen, a, b) for step, seen, a, b in self._spans]
        self._spans.append((self._step, phase, self._since, now))
        self._since = now

    def _end(self, done: int) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None
        self._link.enter("evaluation", done)
        self._clock.watcher = None
        try:
            if recording.trace is not None:
                self._end_trace(recording, recording.trace, done)
            elif recording.photographer is not None:
                path = snapshot_file(self._run, step=recording.first, rank=self._journal.rank)
                self._photographer.end(path, step=done)
                self._tell(recording, path, done)
        except Exception as error:
            self._complain(error)
        if self._journal.rank == 0:  # all ranks have read it: they did before this recording's first step
            withdraw_request(self._run, recording.request.id)

    def _end_trace(self, recording: Recording, trace: profile, done: int) -> None:
        rank = self._journal.rank
        about: dict[str, Any] = {
            "rank": rank,
            "world_size": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
            "host": platform.node(),
            "device": str(self._photographer.device),
            "steps": [recording.first, done],
            "phases": self._spans,
        }
        trace.add_metadata_json("trimaran", json.dumps(about))
        trace.stop()
        path = trace_file(self._run, step=recording.first, rank=rank)
        writer = threading.Thread(target=self._write, args=(recording, trace, path, done), name="trimaran-trace")
        writer.start()
        self._writers.append(writer)

    def _write(self, recording: Recording, trace: profile, path: Path, done: int) -> None:
        """Write the trace while training goes on: packing it may take seconds."""
        draft = path.with_name(f".{path.name}")  # the ending stays: torch packs by it
        try:
            path.parent.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(draft))
            draft.replace(path)
            self._tell(recording, path, done)
        except Exception as error:
            self._complain(error)
            with suppress(OSError):
                draft.unlink(missing_ok=True)  # half a trace would keep a full disk full

    def _tell(self, recording: Recording, path: Path, done: int) -> None:
        what = "memory" if recording.request.memory else "trace"
        where = str(path.relative_to(self._run.path))
        facts = {"what": what, "path": where, "first": recording.first, "last": done, "request": recording.request.id}
        self._journal.event("profile", step=done, **facts)

    def _complain(self, error: Exception) -> None:
        log.warning("the profile could not be made: %s", error)
        self._journal.event("profile", step=self._step, what="failed", message=str(error), request=self._served)

    def _forget_nonsense(self) -> None:
        """Remove a request that nobody can read, which would be asked about for ever."""
        try:
            Path(self._file).unlink(missing_ok=True)
        except OSError as error:
            self._complain(error)


def build_profiler(
    run: RunDirectory,
    journal: Journal,
    clock: Clock,
    networks: Sequence[Network],
    device: torch.device,
    link: SupervisorLink,
) -> Profiler:
    """Return the profiler of a rank that trains `networks`."""
    telemetry = run.read_recipe().telemetry
    photographer = Photographer([each.module for each in networks], device, history=telemetry.memory_snapshots)
    profiler = Profiler(run, telemetry, journal, clock, photographer, link)
    photograph_oom(photographer, run, rank=journal.rank, step=lambda: profiler.step)
    return profiler


def _start_trace(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    trace = profile(activities=activities)
    trace.start()
    return trace
