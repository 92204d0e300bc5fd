"""A job over weeks as a discrete-event simulation: steps, checkpoints, failures, restarts, repairs and spares.

Between two events nothing happens but steps, so the clock jumps from event to event. The times of the steps are drawn
once; the job takes them in turn, and prefix sums say how many fit before the next event. The result is that of a
simulation step by step (`tests/unit/test_simulate_job.py`).
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

# The rates are those of Llama 3 405B: 419 unexpected and 47 planned interruptions in 54 days on 16,384 H100s (A. Dubey
# et al., "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.4 and table 5). The table's counts add up to 419;
# its 30.1 % for faulty GPUs does not (148 of 419 is 35.3 %), so the counts are used.
LLAMA_DAYS, LLAMA_DEVICES, LLAMA_PLANNED = 54.0, 16_384, 47
DAY_SECONDS = 86_400.0
# A hang is noticed when a collective times out: PyTorch's default for NCCL. A crash ends the process, which the
# supervisor sees within seconds.
HANG_SECONDS, CRASH_SECONDS = 600.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureClass:
    """A cause of interruptions."""

    name: str
    count: int  # how many there were in LLAMA_DAYS on LLAMA_DEVICES
    loses_node: bool  # the node is set aside and repaired; a spare takes its place
    detect_seconds: float = CRASH_SECONDS  # until the job notices

    @property
    def per_device_second(self) -> float:
        """Interruptions per second that one device causes."""
        return self.count / (LLAMA_DAYS * DAY_SECONDS * LLAMA_DEVICES)


# Which of them cost a node, and which show as a hang, is our reading: the paper does not say.
LLAMA_FAILURES = (
    FailureClass(name="faulty GPU", count=148, loses_node=True),
    FailureClass(name="GPU HBM3 memory", count=72, loses_node=True),
    FailureClass(name="software bug", count=54, loses_node=False),
    FailureClass(name="network switch or cable", count=35, loses_node=True, detect_seconds=HANG_SECONDS),
    FailureClass(name="host maintenance", count=32, loses_node=True),
    FailureClass(name="GPU SRAM memory", count=19, loses_node=True),
    FailureClass(name="GPU system processor", count=17, loses_node=True),
    FailureClass(name="network card", count=7, loses_node=True, detect_seconds=HANG_SECONDS),
    FailureClass(name="NCCL watchdog timeout", count=7, loses_node=False, detect_seconds=HANG_SECONDS),
    FailureClass(name="silent data corruption", count=6, loses_node=True),
    FailureClass(name="GPU thermal interface or sensor", count=6, loses_node=True),
    FailureClass(name="SSD", count=3, loses_node=True),
    FailureClass(name="power supply", count=3, loses_node=True),
    FailureClass(name="server chassis", count=2, loses_node=True),
    FailureClass(name="IO expansion board", count=2, loses_node=True),
    FailureClass(name="dependency", count=2, loses_node=False),
    FailureClass(name="CPU", count=2, loses_node=True),
    FailureClass(name="system memory", count=2, loses_node=True),
)


Activity = Literal["train", "replay", "save", "detect", "restart", "wait for a node", "slow node"]
ACTIVITIES: tuple[Activity, ...] = ("train", "replay", "save", "detect", "restart", "wait for a node", "slow node")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTerms:
    """Checkpoints. Training continues while one is written. The next one waits for it."""

    every: int  # so many steps
    stall: float  # seconds that each stops training
    write: float = 0.0  # seconds until it can be restored


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNodeTerms:
    """Nodes that become slow: how often one does, how slow every step is then, and until it is found and replaced."""

    per_node_second: float = 1 / (5000 * DAY_SECONDS)
    factor: float = 1.1
    seconds: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTerms:
    """Everything about a job but its steps."""

    num_devices: int  # that train; spare nodes come on top
    devices_per_node: int = 8
    spares: int = 0
    save: SaveTerms
    restart: float = 600.0  # seconds from the detection of a failure to the first step: diagnosis, processes, loading
    replace: float = 120.0  # seconds more if a spare has to take the place of a node
    repair: float = DAY_SECONDS  # mean seconds until a broken node is a spare again
    failures: tuple[FailureClass, ...] = LLAMA_FAILURES
    failure_scale: float = 1.0  # how much more often things fail than `failures` say
    planned_per_second: float = LLAMA_PLANNED / (LLAMA_DAYS * DAY_SECONDS)  # by people, after a checkpoint
    slow: SlowNodeTerms = SlowNodeTerms()

    @property
    def mtbf(self) -> float:
        """Mean seconds between failures of the job; infinity if nothing fails."""
        rate = self.failure_scale * self.num_devices * sum(each.per_device_second for each in self.failures)
        return 1 / rate if rate else math.inf


class Interruption(NamedTuple):
    """An interruption: when, its class (None: planned), and how long the repair of its node takes."""

    time: float
    cause: FailureClass | None
    repair: float


class Segment(NamedTuple):
    """A stretch of the job: what it did, from when to when, why, and the step at its end."""

    activity: Activity
    start: float
    end: float
    cause: str
    step: int


@dataclass(slots=True, kw_only=True)
class JobHistory:
    """What happened: the segments in order, seconds by activity, steps that survived, and times of recovery."""

    seconds: float
    steps: int
    by_activity: dict[Activity, float]
    segments: list[Segment]
    num_saves: int
    recoveries: list[float] = field(default_factory=list)
    by_cause: dict[str, int] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        """The fraction of the time spent on steps that survived, at the speed of healthy nodes."""
        return self.by_activity["train"] / self.seconds

    @property
    def mttr(self) -> float:
        """Mean seconds from a failure to the first step that had not been done before; 0 without failures."""
        return sum(self.recoveries) / len(self.recoveries) if self.recoveries else 0.0


class StepTimes:
    """Step times that a job takes in turn, over and over, with prefix sums to jump over many."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.prefix = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])
        self.count, self.total = len(seconds), float(self.prefix[-1])
        self._sums: list[float] = self.prefix.tolist()

    @property
    def mean(self) -> float:
        return self.total / self.count

    def until(self, number: int) -> float:
        """Return the seconds of the first `number` steps."""
        rounds, rest = divmod(number, self.count)
        return rounds * self.total + self._sums[rest]

    def between(self, first: int, last: int) -> float:
        return self.until(last) - self.until(first)

    def least(self, number: int) -> float:
        """Return the fewest seconds that any `number` steps in a row take."""
        rounds, rest = divmod(number, self.count)
        twice = np.concatenate([self.prefix, self.prefix[1:] + self.total])
        return rounds * self.total + float((twice[rest : rest + self.count] - twice[: self.count]).min())

    def that_fit(self, first: int, seconds: float) -> int:
        """Return how many steps from number `first` on are complete after so many seconds."""
        target = self.until(first) + seconds * (1 + 1e-12)
        rounds = int(target // self.total)
        return rounds * self.count + bisect_right(self._sums, target - rounds * self.total) - 1 - first


def draw_interruptions(terms: JobTerms, seconds: float, seed: int) -> list[Interruption]:
    """Return all interruptions of so many seconds, in order. They do not depend on spares and checkpoints."""
    random = np.random.default_rng([seed, 1])
    causes: list[FailureClass | None] = [*terms.failures, None]
    rates = [terms.failure_scale * terms.num_devices * each.per_device_second for each in terms.failures]
    found = []
    for cause, rate in zip(causes, [*rates, terms.planned_per_second], strict=True):
        times = random.uniform(0.0, seconds, random.poisson(rate * seconds))
        repairs = random.exponential(terms.repair, len(times))
        found += [Interruption(float(time), cause, float(each)) for time, each in zip(times, repairs, strict=True)]
    return sorted(found, key=lambda each: each.time)


def draw_slow_periods(terms: JobTerms, seconds: float, seed: int) -> list[tuple[float, float]]:
    """Return the periods in which some node is slow; those that overlap are one."""
    random = np.random.default_rng([seed, 2])
    nodes = terms.num_devices / terms.devices_per_node
    starts = np.sort(random.uniform(0.0, seconds, random.poisson(terms.slow.per_node_second * nodes * seconds)))
    periods: list[tuple[float, float]] = []
    for start in starts.tolist():
        if periods and start <= periods[-1][1]:
            periods[-1] = periods[-1][0], start + terms.slow.seconds
        else:
            periods.append((start, start + terms.slow.seconds))
    return periods


def simulate_job(terms: JobTerms, times: StepTimes, seconds: float, *, seed: int = 0) -> JobHistory:
    """Return the history of a job that starts with all its nodes and runs for so many seconds."""
    return _JobSimulation(terms, times, seconds, seed).run()


class _JobSimulation:
    """The state of a job. It trains unless an outage is planned: what follows one another, and until when."""

    def __init__(self, terms: JobTerms, times: StepTimes, seconds: float, seed: int) -> None:
        self._terms, self._times, self._seconds = terms, times, seconds
        self._interruptions = draw_interruptions(terms, seconds, seed)
        # The job is slow from each even one of these times to the next.
        self._changes = [edge for period in draw_slow_periods(terms, seconds, seed) for edge in period]
        self._next_change = 0
        self._now, self._taken, self._into = 0.0, 0, 0.0  # the clock, step times used up, seconds into the next step
        self._done = self._best = 0  # steps that exist, and the most there ever were
        self._saved, self._writing = 0, (0.0, 0)  # the newest complete checkpoint; the one after: complete at, step
        self._stall, self._last_save = 0.0, 0
        self._least = times.least(terms.save.every)  # between two checkpoints
        self._spares, self._missing, self._repairs = terms.spares, 0, list[float]()
        self._outage: list[tuple[Activity, float]] = []
        self._cause, self._failed_at, self._began = "", math.inf, 0.0
        self._history = JobHistory(
            seconds=seconds, steps=0, by_activity=dict.fromkeys(ACTIVITIES, 0.0), segments=[], num_saves=0
        )

    def run(self) -> JobHistory:
        for interruption in self._interruptions:
            self._advance(interruption.time)
            self._interrupt(interruption)
        self._advance(self._seconds)
        self._end_segment("train")
        self._history.steps = self._best
        return self._history

    def _advance(self, until: float) -> None:
        """Move the clock: through what is left of an outage, then training."""
        while self._outage and self._now < until:
            activity, end = self._outage[0]
            self._spend(activity, min(until, end) - self._now)
            if self._now < end:
                return
            self._end_segment(activity)
            self._outage.pop(0)
            if not self._outage:  # spares take the place of the missing nodes
                while self._repairs and self._repairs[0] <= self._now:
                    heapq.heappop(self._repairs)
                    self._spares += 1
                self._spares, self._missing = self._spares - self._missing, 0
        while self._now < until:
            self._train(until)

    def _spend(self, activity: Activity, seconds: float) -> None:
        self._history.by_activity[activity] += seconds
        self._now += seconds

    def _end_segment(self, activity: Activity) -> None:
        if self._now > self._began:
            self._history.segments.append(Segment(activity, self._began, self._now, self._cause, self._done))
        self._began = self._now

    def _interrupt(self, interruption: Interruption) -> None:
        """Plan the outage that follows. One that comes during another starts it again."""
        cause, now, terms = interruption.cause, self._now, self._terms
        complete, step = self._writing
        self._saved = step if complete <= now else self._saved
        if cause is None:
            if not self._outage:  # else people wait until the job runs again
                self._end_segment("train")
                self._cause = "planned"
                saved = now + terms.save.stall + terms.save.write
                self._outage = [("save", saved), ("restart", saved + terms.restart)]
                self._go_back(to=self._done)
                self._writing = saved, self._done
            return
        self._end_segment(self._outage[0][0] if self._outage else "train")
        self._history.by_cause[cause.name] = self._history.by_cause.get(cause.name, 0) + 1
        self._cause, self._failed_at = cause.name, min(self._failed_at, now)
        self._go_back(to=self._saved)
        if cause.loses_node:
            self._missing += 1
            heapq.heappush(self._repairs, now + interruption.repair)
        noticed = now + cause.detect_seconds
        lacking = self._missing - self._spares  # so many repairs are awaited
        ready = max(noticed, heapq.nsmallest(lacking, self._repairs)[-1] if lacking > 0 else 0.0)
        restarted = ready + terms.restart + (terms.replace if self._missing else 0.0)
        self._outage = [("detect", noticed), ("wait for a node", ready), ("restart", restarted)]

    def _go_back(self, *, to: int) -> None:
        """Go back to a step. The step that is not complete was booked as training, and will be repeated."""
        self._history.by_activity["train"] -= self._into
        self._history.by_activity["replay"] += self._into
        self._into = self._stall = 0.0
        self._done = self._last_save = to
        self._writing = 0.0, self._saved

    def _train(self, until: float) -> None:
        """Train to the next checkpoint, to the next change of speed, or until the clock is there."""
        if self._stall > 0:
            part = min(self._stall, until - self._now)
            self._spend("save", part)
            self._stall -= part
            if self._stall <= 0:
                self._start_write()
            return
        while self._next_change < len(self._changes) and self._changes[self._next_change] <= self._now:
            self._next_change += 1
        is_slow = self._next_change % 2 == 1
        factor = self._terms.slow.factor if is_slow else 1.0
        limit = self._changes[self._next_change] if self._next_change < len(self._changes) else math.inf
        available = (min(until, limit) - self._now) / factor
        is_steady = self._done == self._last_save and self._done >= self._best and self._failed_at == math.inf
        never_waits = self._least >= self._terms.save.write  # no checkpoint for the one before
        if never_waits and is_steady and not is_slow and self._into == 0 and self._jump(available):
            return
        steps = self._last_save + self._terms.save.every - self._done
        needed = self._times.between(self._taken, self._taken + steps) - self._into
        if needed > available:
            steps = self._times.that_fit(self._taken, self._into + available)
        self._take_steps(steps, min(needed, available), factor)
        if needed <= available:
            waiting = max(0.0, self._writing[0] - self._now)  # one checkpoint at a time
            self._stall = waiting + self._terms.save.stall
            self._last_save = self._done
            if self._stall == 0:
                self._start_write()

    def _jump(self, available: float) -> bool:
        """Jump over all complete checkpoints and the steps before them that fit; return whether any do."""
        every, stall, first = self._terms.save.every, self._terms.save.stall, self._taken

        def elapsed(saves: int) -> float:
            return self._times.between(first, first + saves * every) + saves * stall

        most = int(available / (self._least + stall)) + 1
        saves = bisect_right(range(most + 1), available, key=elapsed) - 1
        if not saves:
            return False
        self._take_steps(saves * every, self._times.between(first, first + saves * every), 1.0)
        self._spend("save", saves * stall)
        self._last_save = self._done
        self._saved = max(self._saved, self._done - every if saves > 1 else self._writing[1])
        self._writing = self._now + self._terms.save.write, self._done
        self._history.num_saves += saves
        return True

    def _take_steps(self, steps: int, seconds: float, factor: float) -> None:
        """Do so many steps in so many seconds of healthy nodes. What is left of them goes into the next step."""
        times, first, history = self._times, self._taken, self._history
        repeated = max(0, min(steps, self._best - self._done))
        replay = min(seconds, max(0.0, times.between(first, first + repeated) - self._into)) if repeated else 0.0
        if self._done + steps > self._best and self._failed_at < math.inf:
            to_new = times.between(first, first + repeated + 1) - self._into
            history.recoveries.append(self._now + factor * to_new - self._failed_at)
            self._failed_at = math.inf
        history.by_activity["replay"] += replay
        history.by_activity["train"] += seconds - replay
        history.by_activity["slow node"] += (factor - 1) * seconds
        self._into = self._into + seconds - times.between(first, first + steps)
        self._now += factor * seconds
        self._taken, self._done = first + steps, self._done + steps
        self._best = max(self._best, self._done)

    def _start_write(self) -> None:
        self._stall = 0.0
        if self._writing[0] <= self._now:
            self._saved = max(self._saved, self._writing[1])
        self._writing = self._now + self._terms.save.write, self._done
        self._history.num_saves += 1
