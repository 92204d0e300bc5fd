"""Finds ranks that are slow, while all is well otherwise: when steps get longer, all ranks are asked what they did."""

import contextlib
import shutil
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from trimaran.launch.find_stragglers import Straggler, find_stragglers, is_starved
from trimaran.launch.node import Node, Orders
from trimaran.launch.rank_report import RankReport, read_rank_reports
from trimaran.run import Heartbeat, IncidentLog, RunDirectory

RECENT, USUAL = 8, 20  # steps
SUSPICIOUS = 1.3  # times the usual seconds of a step
PAUSE_SECONDS = (0.5, 60.0)  # between two roll calls, which cost every rank a tenth of a second: at first, at most
STEPS_APART = 100  # two incidents about one rank
ANSWER_SECONDS = 1.0


class Watched(Protocol):
    """What a roll call needs to know of an attempt; see `Watch`."""

    nodes: Sequence[Node]
    orders: Orders


class StepDurations:
    """How long steps take: lately, and at their best. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._passed: deque[tuple[int, float]] = deque(maxlen=USUAL * 4)
        self.usual: float | None = None

    def note(self, heartbeat: Heartbeat) -> None:
        """Take in what a rank shows. What is no plain step, such as an evaluation, is left out."""
        if heartbeat.section == "data":
            return  # between two steps
        if heartbeat.section != "step":
            self._passed.clear()
        elif not self._passed or heartbeat.step > self._passed[-1][0]:
            self._passed.append((heartbeat.step, heartbeat.entered))
            best = self._mean(USUAL)
            if best is not None:
                self.usual = min(best, self.usual or best)

    @property
    def slowdown(self) -> float | None:
        """How many times as long as at their best the last steps took; None when too little is known."""
        recent = self._mean(RECENT)
        return recent / self.usual if recent is not None and self.usual else None

    @property
    def is_suspicious(self) -> bool:
        """Whether the last steps took too long, and not only the very last of them or the first."""
        slowdown, late = self.slowdown, self._mean(RECENT // 2)
        if slowdown is None or late is None or self.usual is None:
            return False
        late /= self.usual
        return min(late, 2 * slowdown - late) >= SUSPICIOUS

    @property
    def since(self) -> float | None:
        """When the last few steps began."""
        return self._before(RECENT)[1] if self._mean(RECENT) is not None else None

    def _mean(self, steps: int) -> float | None:
        if not self._passed or self._passed[-1][0] - self._passed[0][0] < steps:
            return None
        begun, entered = self._before(steps)
        return (self._passed[-1][1] - entered) / (self._passed[-1][0] - begun)

    def _before(self, steps: int) -> tuple[int, float]:
        last = self._passed[-1][0]
        return next(each for each in reversed(self._passed) if last - each[0] >= steps)


class SlowRankCheck:
    """The search for slow ranks in one attempt. Answers are read when they have come: nobody waits for them.

    A rank is called slow when it was in two roll calls in a row, each about other steps. One may be bad luck.
    """

    def __init__(self, run: RunDirectory, incidents: IncidentLog) -> None:
        self._run, self._incidents = run, incidents
        self._pace = StepDurations()
        self._due, self._pause = 0.0, PAUSE_SECONDS[0]
        self._asked: float | None = None  # when all ranks were asked, if they have not answered yet
        self._suspects: frozenset[int] = frozenset()  # of the last roll call
        self._before: dict[int, RankReport] = {}
        self._before_step = 0
        self._named: dict[int, int] = {}  # by rank: the step at which it was called slow last
        self._first = True

    def take(self, watch: Watched) -> None:
        """Look at the heartbeats; when they are suspicious, ask all ranks, and file an incident for each that is slow."""
        heartbeats = {rank: heartbeat for node in watch.nodes for rank, heartbeat in node.heartbeats().items()}
        if len(heartbeats) < 2 or len(heartbeats) < watch.orders.world_size:
            return
        heartbeat = heartbeats[min(heartbeats)]
        self._pace.note(heartbeat)
        if self._asked is not None:
            self._hear(watch, heartbeat.step)
        elif self._is_due(heartbeat.step):
            self._ask(watch)

    def _is_due(self, step: int) -> bool:
        slowdown = self._pace.slowdown
        if slowdown is None or time.monotonic() < self._due:
            return False
        if self._suspects:
            return step >= self._before_step + RECENT
        # One look when enough steps are done, for a rank that was slow from the start; then only on suspicion.
        if not self._pace.is_suspicious and not self._first:
            self._pause = PAUSE_SECONDS[0]
            return False
        return True

    def _ask(self, watch: Watched) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)  # what ranks said the last time must not be taken for an answer
        with contextlib.suppress(OSError):  # nobody answers then
            for node in watch.nodes:
                node.collect_reports(self._folder, seconds=0.0, gently=True)
        self._asked = time.monotonic()

    def _hear(self, watch: Watched, step: int) -> None:
        """Judge by the answers, once all are there."""
        assert self._asked is not None
        ranks, waited = range(watch.orders.world_size), time.monotonic() - self._asked
        if waited < ANSWER_SECONDS and not all((self._folder / f"rank-{rank}.json").exists() for rank in ranks):
            return
        self._asked, self._first = None, False
        told, begin = read_rank_reports(self._run, self._folder, ranks), self._pace.since
        if begin is None:  # something else than plain steps came in between
            self._suspects = frozenset()
            return
        since = max([time.time() - (time.monotonic() - begin), *(each.moment.time for each in self._before.values())])
        found = find_stragglers(told, since=since)
        for each in found:
            if each.rank in self._suspects and not is_starved(each, self._before, told):
                self._file(each, watch, step)
        self._suspects = frozenset(each.rank for each in found)
        self._before, self._before_step = told, step
        self._pause = PAUSE_SECONDS[0] if found else min(2 * self._pause, PAUSE_SECONDS[1])
        self._due = time.monotonic() + self._pause

    @property
    def _folder(self) -> Path:
        return self._run.incident("roll-call")

    def _file(self, found: Straggler, watch: Watched, step: int) -> None:
        if step - self._named.get(found.rank, -STEPS_APART) < STEPS_APART:
            return
        self._named[found.rank] = step
        seen = self._pace.slowdown or 0.0
        slowdown = seen if seen >= SUSPICIOUS else found.slowdown
        self._incidents.notice(
            "straggler",
            f"rank {found.rank} is slow: every step takes {slowdown:.1f} times as long because of it",
            attempt=watch.orders.attempt,
            step=step,
            suspects=(found.rank,),
            victims=tuple(rank for rank in range(watch.orders.world_size) if rank != found.rank),
            evidence={"facts": found.facts, "slowdown": slowdown},
            action="continued",
            cost={"slowdown": slowdown},
        )
