"""Finds slow ranks in a run that otherwise works: when steps get longer, it collects and compares rank reports."""

import contextlib
import shutil
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from trimaran.launch.supervise.find_stragglers import Straggler, find_stragglers, is_starved
from trimaran.launch.supervise.node import AttemptSpec, Node
from trimaran.launch.supervise.rank_report import RankReport, read_rank_reports
from trimaran.runs import Heartbeat, IncidentLog, RunDirectory

RECENT_STEPS, BASELINE_STEPS = 8, 20
MIN_SLOWDOWN = 1.3  # times the baseline's seconds per step
# Between two collections, each of which costs every rank 0.1 s.
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 60.0
STEPS_BETWEEN_INCIDENTS = 100  # about the same rank
ANSWER_SECONDS = 1.0


class WatchedAttempt(Protocol):
    """The part of an `AttemptWatch` that the check needs."""

    nodes: Sequence[Node]
    spec: AttemptSpec


class StepDurations:
    """The duration of recent steps, and of the fastest ones (the baseline). Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._passed: deque[tuple[int, float]] = deque(maxlen=BASELINE_STEPS * 4)
        self.baseline: float | None = None

    def add(self, heartbeat: Heartbeat) -> None:
        """Add a rank's heartbeat. Sections other than plain steps, such as an evaluation, start the window anew."""
        if heartbeat.section in ("data", "copy"):
            return  # between two steps, or a part of one
        if heartbeat.section != "step":
            self._passed.clear()
            if heartbeat.section in ("restore", "first"):  # the plan may have changed, and with it the time of a step
                self.baseline = None
        elif not self._passed or heartbeat.step > self._passed[-1][0]:
            self._passed.append((heartbeat.step, heartbeat.entered))
            mean = self._mean(BASELINE_STEPS)
            if mean is not None:
                self.baseline = min(mean, self.baseline or mean)

    @property
    def slowdown(self) -> float | None:
        """How many times as long as the baseline the recent steps took; None if there are too few steps."""
        recent = self._mean(RECENT_STEPS)
        return recent / self.baseline if recent is not None and self.baseline else None

    @property
    def is_suspicious(self) -> bool:
        """Whether both the first and the second half of the recent steps took too long."""
        slowdown, second_half = self.slowdown, self._mean(RECENT_STEPS // 2)
        if slowdown is None or second_half is None or self.baseline is None:
            return False
        second_half /= self.baseline
        return min(second_half, 2 * slowdown - second_half) >= MIN_SLOWDOWN

    @property
    def since(self) -> float | None:
        """When the recent steps began."""
        return self._before(RECENT_STEPS)[1] if self._mean(RECENT_STEPS) is not None else None

    def _mean(self, steps: int) -> float | None:
        if not self._passed or self._passed[-1][0] - self._passed[0][0] < steps:
            return None
        begun, entered = self._before(steps)
        return (self._passed[-1][1] - entered) / (self._passed[-1][0] - begun)

    def _before(self, steps: int) -> tuple[int, float]:
        last = self._passed[-1][0]
        return next(each for each in reversed(self._passed) if last - each[0] >= steps)


class SlowRankCheck:
    """The search for slow ranks in one attempt. Polling never blocks: reports are read once they have arrived.

    A rank is slow if two collections in a row, about different steps, find it to be a straggler.
    """

    def __init__(self, run: RunDirectory, incidents: IncidentLog) -> None:
        self._run, self._incidents = run, incidents
        self._durations = StepDurations()
        self._due, self._pause = 0.0, MIN_PAUSE_SECONDS
        self._requested: float | None = None  # when reports were requested, while they are pending
        self._suspects: frozenset[int] = frozenset()  # of the last collection
        self._before: dict[int, RankReport] = {}
        self._before_step = 0
        self._last_incident: dict[int, int] = {}  # by rank: the step of its last incident
        self._first = True

    def poll(self, watch: WatchedAttempt) -> None:
        """Read the heartbeats; if steps got slower, collect reports and file an incident for each slow rank."""
        heartbeats = {rank: heartbeat for node in watch.nodes for rank, heartbeat in node.heartbeats().items()}
        if len(heartbeats) < 2 or len(heartbeats) < watch.spec.world_size:
            return
        heartbeat = heartbeats[min(heartbeats)]
        self._durations.add(heartbeat)
        if self._requested is not None:
            self._read_reports(watch, heartbeat.step)
        elif self._is_due(heartbeat.step):
            self._request_reports(watch)

    def _is_due(self, step: int) -> bool:
        slowdown = self._durations.slowdown
        if slowdown is None or time.monotonic() < self._due:
            return False
        if self._suspects:
            return step >= self._before_step + RECENT_STEPS
        # Collect once when enough steps are done, for a rank that was slow from the start; then only on suspicion.
        if not self._durations.is_suspicious and not self._first:
            self._pause = MIN_PAUSE_SECONDS
            return False
        return True

    def _request_reports(self, watch: WatchedAttempt) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)  # reports of the last collection
        with contextlib.suppress(OSError):  # then no report arrives
            for node in watch.nodes:
                node.collect_reports(self._folder, seconds=0.0, gently=True)
        self._requested = time.monotonic()

    def _read_reports(self, watch: WatchedAttempt, step: int) -> None:
        """Find stragglers once all reports have arrived."""
        assert self._requested is not None
        ranks, waited = range(watch.spec.world_size), time.monotonic() - self._requested
        if waited < ANSWER_SECONDS and not all((self._folder / f"rank-{rank}.json").exists() for rank in ranks):
            return
        self._requested, self._first = None, False
        reports, begin = read_rank_reports(self._run, self._folder, ranks), self._durations.since
        if begin is None:  # something other than plain steps came in between
            self._suspects = frozenset()
            return
        since = max([time.time() - (time.monotonic() - begin), *(each.moment.time for each in self._before.values())])
        stragglers = find_stragglers(reports, since=since)
        for each in stragglers:
            if each.rank in self._suspects and not is_starved(each, self._before, reports):
                self._file(each, watch, step)
        self._suspects = frozenset(each.rank for each in stragglers)
        self._before, self._before_step = reports, step
        self._pause = MIN_PAUSE_SECONDS if stragglers else min(2 * self._pause, MAX_PAUSE_SECONDS)
        self._due = time.monotonic() + self._pause

    @property
    def _folder(self) -> Path:
        return self._run.incident("roll-call")

    def _file(self, straggler: Straggler, watch: WatchedAttempt, step: int) -> None:
        if step - self._last_incident.get(straggler.rank, -STEPS_BETWEEN_INCIDENTS) < STEPS_BETWEEN_INCIDENTS:
            return
        self._last_incident[straggler.rank] = step
        measured = self._durations.slowdown or 0.0
        slowdown = measured if measured >= MIN_SLOWDOWN else straggler.slowdown
        self._incidents.notice(
            "straggler",
            f"rank {straggler.rank} is slow: each step takes {slowdown:.1f} times as long because of it",
            attempt=watch.spec.attempt,
            step=step,
            suspects=(straggler.rank,),
            victims=tuple(rank for rank in range(watch.spec.world_size) if rank != straggler.rank),
            evidence={"facts": straggler.facts, "slowdown": slowdown},
            action="continued",
            cost={"slowdown": slowdown},
        )
