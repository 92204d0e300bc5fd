"""Finds slow ranks in a run that otherwise works: when steps get longer, it collects and compares rank reports.

An operation of a group is complete when the last member has arrived. The time from there, or from a rank's own last
operation, to its next arrival is the rank's busy time; the rest is waiting. A rank that waits far less than all ranks
with the same work holds them up. Only ranks of one machine are compared, because they share a clock.
"""

import contextlib
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimaran.launch.supervise.attempt_watch import AttemptWatch
from trimaran.launch.supervise.rank_report import RankReport, read_rank_reports
from trimaran.runs import Heartbeat, IncidentLog, RunDirectory

MIN_WAIT_FRACTION = 0.2  # of the time: each of the other ranks waits at least this long for a straggler
MAX_STRAGGLER_WAIT = 0.25  # the straggler waits at most this fraction of what the others wait
MIN_ARRIVALS = 12  # of each rank in the window
Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that holds up the others."""

    rank: int
    slowdown: float  # steps take this many times as long because of it
    waiting: float  # the fraction of the time that ranks with the same work wait


@dataclass(frozen=True, slots=True)
class OperationArrival:
    """When a rank arrived at an operation, which one (`key`), its kind and the group's members."""

    time: float
    key: Kind
    kind: Kind
    members: tuple[int, ...]


def find_stragglers(reports: Mapping[int, RankReport], *, since: float = 0.0) -> list[Straggler]:
    """Return the ranks that held up the others after `since`, in seconds since the epoch.

    A report contains the last few hundred operations of its rank; earlier ones are not seen.
    """
    hosts: dict[str, list[RankReport]] = defaultdict(list)
    for each in reports.values():
        if each.answered:
            hosts[each.moment.host].append(each)
    stragglers: list[Straggler] = []
    for group in [each for each in hosts.values() if len(each) > 1]:
        arrivals = {each.rank: _arrivals(each) for each in group}
        if not all(arrivals.values()):
            continue
        begin = max(since, *(each[0].time for each in arrivals.values()))
        end = min(each[-1].time for each in arrivals.values())
        times = [[each.time for each in of_rank if begin <= each.time <= end] for of_rank in arrivals.values()]
        if any(len(each) < MIN_ARRIVALS for each in times):
            continue
        middle = max(each[len(each) // 2] for each in times)  # an arrival, so that no single pause is in both halves
        window, *halves = (  # the fraction of the time that each rank waited for others
            {rank: 1 - busy / (last - first) for rank, busy in busy_seconds(arrivals, first, last).items()}
            for first, last in ((begin, end), (begin, middle), (middle, end))
        )
        # Groups of ranks with the same work: same kinds of operations, group sizes and message directions.
        roles: dict[frozenset[Kind], list[int]] = defaultdict(list)
        for each in group:
            calls: set[Kind] = {(op.op, len(each.groups.get(op.group, ()))) for op in each.operations}
            calls |= {(message["op"], message["peer"] > each.rank) for message in each.messages}
            roles[frozenset(calls)].append(each.rank)
        for role in roles.values():
            for rank in role:
                others = [other for other in role if other != rank]
                # A straggler is slow in both halves, if less clearly; a single pause does not make one.
                in_both = all(_holds_up(rank, others, half, slack=2.0) for half in halves) if others else False
                if in_both and _holds_up(rank, others, window):
                    waiting = min(window[other] for other in others)
                    stragglers.append(Straggler(rank=rank, slowdown=1 / (1 - waiting), waiting=waiting))
    return stragglers


def is_starved(straggler: Straggler, before: Mapping[int, RankReport], after: Mapping[int, RankReport]) -> bool:
    """Return whether a rank was slow between two reports only because busy cores, too few for all, ran it less."""
    fractions = {
        rank: (each.moment.starved - before[rank].moment.starved)
        / max(1e-9, each.moment.time - before[rank].moment.time)
        for rank, each in after.items()
        if each.moment.host == after[straggler.rank].moment.host and rank in before
    }
    others = [fraction for rank, fraction in fractions.items() if rank != straggler.rank]
    return straggler.waiting - (fractions[straggler.rank] - min(others)) < MIN_WAIT_FRACTION


def busy_seconds(arrivals: Mapping[int, Sequence[OperationArrival]], begin: float, end: float) -> dict[int, float]:
    """Return the busy time of each rank between two moments."""
    # When the last member arrived at each operation. Operations without all members' arrivals are left out.
    seen: dict[Kind, list[float]] = defaultdict(list)
    members: dict[Kind, tuple[int, ...]] = {}
    for each in (arrival for of_rank in arrivals.values() for arrival in of_rank):
        seen[each.key].append(each.time)
        members[each.key] = each.members
    here = arrivals.keys()
    completed = {key: max(times) for key, times in seen.items() if len(times) == len(here & set(members[key]))}
    # Pairs of kinds (first, next) where a rank began the next without waiting for the first.
    overlapping: set[tuple[Kind, Kind]] = set()
    for of_rank in arrivals.values():
        unfinished: list[OperationArrival] = []
        for each in of_rank:
            unfinished = [first for first in unfinished if completed[first.key] > each.time]
            overlapping |= {(first.kind, each.kind) for first in unfinished}
            if each.key in completed:
                unfinished.append(each)
    return {rank: sum(_busy(each, completed, overlapping, begin, end)) for rank, each in arrivals.items()}


def _holds_up(rank: int, others: Sequence[int], waits: Mapping[int, float], *, slack: float = 1.0) -> bool:
    least = min(waits[other] for other in others)
    return least * slack >= MIN_WAIT_FRACTION and waits[rank] <= MAX_STRAGGLER_WAIT * slack * least


def _arrivals(report: RankReport) -> list[OperationArrival]:
    """Return a rank's arrivals in order. Message n from one rank to another is an operation of these two."""
    rank = report.rank
    arrivals = [
        OperationArrival(
            each.time, (each.group, each.number), (each.group, each.op, each.sizes), report.groups[each.group]
        )
        for each in report.operations
        if each.group in report.groups
    ]
    for each in report.messages:
        ends = (rank, each["peer"]) if each["op"] == "send" else (each["peer"], rank)
        arrivals.append(OperationArrival(each["time"], (*ends, each["number"]), (*ends, each["op"]), ends))
    return sorted(arrivals, key=lambda each: each.time)


def _busy(
    of_rank: Sequence[OperationArrival],
    completed: Mapping[Kind, float],
    overlapping: set[tuple[Kind, Kind]],
    begin: float,
    end: float,
) -> Iterator[float]:
    """Yield, for each arrival, the rank's time since everything that it waited for was complete."""
    recent: dict[Kind, float] = {}  # when the last operation of each kind was complete
    last = of_rank[0]
    for each in of_rank[1:]:
        if last.key in completed:
            recent[last.kind] = completed[last.key]
        waited = (time for kind, time in recent.items() if time <= each.time and (kind, each.kind) not in overlapping)
        start = max(last.time, max(waited, default=last.time), begin)
        yield max(0.0, min(each.time, end) - start)
        last = each


RECENT_STEPS, BASELINE_STEPS = 8, 20
MIN_SLOWDOWN = 1.3  # times the baseline's seconds per step
# Between two collections, each of which costs every rank 0.1 s.
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 60.0
STEPS_BETWEEN_INCIDENTS = 100  # about the same rank
ANSWER_SECONDS = 1.0


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

    def poll(self, watch: AttemptWatch) -> None:
        """Read the heartbeats; if steps got slower, collect reports and file an incident for each slow rank."""
        heartbeats = {rank: heartbeat for node in watch.nodes for rank, heartbeat in node.heartbeats().items()}
        if len(heartbeats) < 2 or len(heartbeats) < watch.spec.world_size:
            return
        heartbeat = heartbeats[min(heartbeats)]
        self._durations.add(heartbeat)
        if self._requested is not None:
            self._read_reports(watch, heartbeat.step)
        elif self._is_due(heartbeat.step):
            shutil.rmtree(self._folder, ignore_errors=True)  # reports of the last collection
            with contextlib.suppress(OSError):  # then no report arrives
                for node in watch.nodes:
                    node.collect_reports(self._folder, seconds=0.0, gently=True)
            self._requested = time.monotonic()

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

    def _read_reports(self, watch: AttemptWatch, step: int) -> None:
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
            is_filed = step < self._last_incident.get(each.rank, -STEPS_BETWEEN_INCIDENTS) + STEPS_BETWEEN_INCIDENTS
            if is_filed or each.rank not in self._suspects or is_starved(each, self._before, reports):
                continue
            self._last_incident[each.rank] = step
            measured = self._durations.slowdown or 0.0
            slowdown = measured if measured >= MIN_SLOWDOWN else each.slowdown
            fact = f"the ranks with the same work wait {each.waiting:.0%} of the time, and this rank does not wait"
            self._incidents.notice(
                "straggler",
                f"rank {each.rank} is slow: each step takes {slowdown:.1f} times as long because of it",
                attempt=watch.spec.attempt,
                step=step,
                suspects=(each.rank,),
                victims=tuple(rank for rank in ranks if rank != each.rank),
                evidence={"facts": [fact], "slowdown": slowdown},
                action="continued",
                cost={"slowdown": slowdown},
            )
        self._suspects = frozenset(each.rank for each in stragglers)
        self._before, self._before_step = reports, step
        self._pause = MIN_PAUSE_SECONDS if stragglers else min(2 * self._pause, MAX_PAUSE_SECONDS)
        self._due = time.monotonic() + self._pause

    @property
    def _folder(self) -> Path:
        return self._run.incident("roll-call")
