"""When to save and copy the state: often enough that a failure costs little, rarely enough that saving costs less."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np

from trimaran.core import CheckpointSection, Seconds, median_error
from trimaran.cost import Faults, best_interval

MAX_STALL_FRACTION = 0.01  # the largest fraction of training time that may be spent on writing the state to disk
MAX_COPY_FRACTION = 0.005
"""The largest fraction that copies in memory may take. With all other overhead of a run this stays below 1 %."""
MAX_BOUNDED_COPY_FRACTION = 0.01
"""The same where fewer copies would lose more than the recipe's `checkpoint.lost_seconds` after a fault."""
MAX_INTERVAL = Seconds(1800.0)
UNBOUNDED = Seconds(math.inf)
MAX_TIMED_STEPS = 1000
REVIEW_AFTER_COPIES = (16, 64, 128)
"""After this many copies the interval between them is adjusted, then after each further multiple of the last."""
FIRST_TIMED_COPIES = 3
"""The interval is also adjusted after each of the first copies: those to a new slot, and this many more."""
REVIEW_DELAY_STEPS = 2
"""The interval is adjusted this many steps after a copy. Only then it is known how long a GPU waited for it."""
FIRST_SPACING_STEPS = 4  # between the first copies, at least: so that some steps are timed that no copy can have slowed
MIN_SLOWED_SAMPLES, MIN_OTHER_SAMPLES = 3, 6
NUM_STANDARD_ERRORS = 2.0
"""Steps count as slowed by copies only if the difference is larger than this many standard errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """The cost of a checkpoint: how long it stalls training, and how long until it is on disk."""

    stall: Seconds
    write: Seconds


def save_interval(cost: SaveCost, *, between: Seconds) -> Seconds:
    """Return the time between the starts of two checkpoints; `between` is the mean time between failures.

    It is Daly's optimum, at most half an hour. It is longer if training would stall over 1 % of the time, or the disk
    be busy over half of it.
    """
    best = best_interval(cost.stall, between, restart=Seconds(0.0))
    return Seconds(max(cost.stall / MAX_STALL_FRACTION, 2 * cost.write, min(best, MAX_INTERVAL)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBound:
    """What a fault costs at most: steps that are computed again, and how long that takes.

    `steps` and `seconds`: after a fault of ranks or of the fork server. `node_steps` and `node_seconds`: after the loss
    of a node or of the supervisor, and with them of copies in memory. None: all steps since the last checkpoint, or
    since the start without one.
    """

    steps: int | None
    seconds: Seconds | None
    node_steps: int | None
    node_seconds: Seconds | None

    def differs(self, other: "LossBound") -> bool:
        """Return whether the bound for ranks is another number of steps, or any bound another time by a quarter."""
        pairs = (self.seconds, other.seconds), (self.node_seconds, other.node_seconds)
        return self.steps != other.steps or any(
            (mine is not its if mine is None or its is None else abs(mine - its) > 0.25 * its) for mine, its in pairs
        )

    def as_dict(self) -> dict[str, float | None]:
        seconds = {name: None if each is None else float(f"{each:.3g}") for name, each in
                   (("seconds", self.seconds), ("node_seconds", self.node_seconds))}  # fmt: skip
        return {"steps": self.steps, "node_steps": self.node_steps, **seconds}


def copy_every(stall: Seconds, step: Seconds, *, lost_seconds: Seconds = UNBOUNDED) -> int:
    """Return the number of steps between two copies, given the stall of a copy and the time of a step.

    Copies take at most `MAX_COPY_FRACTION` of the time. If a fault could then cost more than `lost_seconds`, copies are
    made more often. They never take more than `MAX_BOUNDED_COPY_FRACTION` of the time.
    """
    if not step:
        return 1
    cheap, dearest = (
        max(1, math.ceil(stall / (each * step))) for each in (MAX_COPY_FRACTION, MAX_BOUNDED_COPY_FRACTION)
    )
    within = max(1, math.floor(lost_seconds / step) - 1) if math.isfinite(lost_seconds) else cheap
    return min(cheap, max(within, dearest))


def max_repeated_steps(every: int, stride: int = 1, *, commit_steps: float = 0.0) -> int:
    """Return how many finished steps a fault costs at most if the state is copied every `every` steps.

    One interval, since a copy counts only once every rank has it, and the steps that may end until then: those that end
    while the last copy is committed, at least one, since it may end before the metrics of the copied step are written
    (see `MemoryTier`), and at most an interval, since the next copy waits for it. `stride` is as in `SaveSchedule`.
    """
    interval = -(-every // stride) * stride
    return interval + min(interval, stride * max(1, math.ceil(commit_steps / stride)))


def is_review(num_copies: int, num_first: int) -> bool:
    """Return whether to adjust the interval after this many copies, of which `num_first` are the first copies."""
    if num_copies <= num_first:
        return num_copies > 0
    return num_copies in REVIEW_AFTER_COPIES or num_copies % REVIEW_AFTER_COPIES[-1] == 0


class StepSamples:
    """Durations of steps, and what they tell about copies that run while training continues."""

    def __init__(self) -> None:
        self._all: deque[float] = deque(maxlen=MAX_TIMED_STEPS)
        self._others: deque[float] = deque(maxlen=MAX_TIMED_STEPS)  # of steps that no copy can have slowed
        self._slowed: deque[float] = deque(maxlen=MAX_TIMED_STEPS)
        """The sums of the steps after each copy that it may have slowed."""
        self._since_copy: list[float] = []

    def record_copy(self) -> None:
        self._since_copy = []

    def record_step(self, seconds: float) -> None:
        """Record the duration of a step without the time that the host spent on a copy."""
        self._all.append(seconds)
        if len(self._since_copy) == REVIEW_DELAY_STEPS:
            self._others.append(seconds)
            return
        self._since_copy.append(seconds)
        if len(self._since_copy) == REVIEW_DELAY_STEPS:
            self._slowed.append(sum(self._since_copy))

    def step_seconds(self) -> Seconds:
        """Return the median duration of a step, of those that no copy can have slowed if there are enough."""
        samples = self._others if len(self._others) >= MIN_OTHER_SAMPLES else self._all
        return Seconds(statistics.median_low(samples))  # of two the shorter: the first step is slow

    def slowdown(self) -> Seconds:
        """Return by how much a copy slows the steps after it, as far as that is more than noise; else 0."""
        if len(self._slowed) < MIN_SLOWED_SAMPLES or len(self._others) < MIN_OTHER_SAMPLES:
            return Seconds(0.0)
        slower = statistics.median(self._slowed) - REVIEW_DELAY_STEPS * statistics.median(self._others)
        error = math.hypot(median_error(self._slowed), REVIEW_DELAY_STEPS * median_error(self._others))
        return Seconds(max(0.0, slower - NUM_STANDARD_ERRORS * error))

    def forget(self) -> None:
        for samples in (self._all, self._others, self._slowed):
            samples.clear()


class CopySchedule:
    """Decides when to copy the state to memory, equally on all ranks: now and then they exchange what copies cost.

    The cost of a copy is the time that the host spends on it, and how long the GPU waits for it, or by how much the
    steps that it overlaps with are longer than others, whichever is more. At first each copy is followed by as many
    steps as its own cost demands, and later copies by as many as their mean cost demands. The first copy to each of
    `num_slots` slots costs more than later ones, so it counts for its own interval only.

    `gather` is as in `checkpoint.ownership`. `every` 0 means never. `stride` is as in `SaveSchedule`.
    """

    def __init__(
        self,
        every: Literal["auto"] | int,
        gather: Callable[[np.ndarray], np.ndarray],
        *,
        lost_seconds: Seconds = UNBOUNDED,
        num_slots: int = 0,
        stride: int = 1,
    ) -> None:
        self.every = 1 if every == "auto" else every
        self.step_seconds = Seconds(0.0)
        """The median duration of a step, that of the first step at first, and 0.0 before it."""
        self.commit_seconds = Seconds(0.0)  # how long after its start a copy is committed on all ranks
        self._is_auto, self._gather, self._lost_seconds, self._stride = every == "auto", gather, lost_seconds, stride
        self._num_slots, self._num_first = num_slots, num_slots + FIRST_TIMED_COPIES
        self._last_step = self._num_copies = self._last_spacing = 0
        self._steps_to_review = 0
        self.exchange_seconds = 0.0  # of the last review: part of the cost of the next copy
        self._samples = StepSamples()
        self._host_seconds: deque[float] = deque()
        """Of the copies for which it is not known yet how long the GPU waited."""
        self._costs: list[tuple[float, float]] = []
        """Of copies since the last review: seconds of the host, and seconds that the GPU waited."""

    def begin(self, step: int) -> None:
        """Start counting at `step`."""
        self._last_step = step

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step - self._last_step >= self.every

    @property
    def max_spacing(self) -> int:
        """How many steps the newest copy that all ranks have is behind at most, apart from the time to commit it."""
        return max(self.every, self._last_spacing)

    @property
    def is_review_due(self) -> bool:
        """Whether `review` must be called after this step. It is the same on all ranks."""
        return self._steps_to_review == 1

    def record_step(self, seconds: float) -> None:
        """Record the duration of a step, without the time spent on checkpoints. Must be called before `review`."""
        self._samples.record_step(seconds)
        self.step_seconds = self.step_seconds or Seconds(seconds)
        if self._steps_to_review > 1:
            self._steps_to_review -= 1

    def record_copy(self, step: int, host_seconds: float) -> None:
        """Record a copy and how long the host spent on it. Every rank must call it at the same step."""
        self._last_step, self._last_spacing = step, step - self._last_step
        self._num_copies += 1
        self._host_seconds.append(host_seconds + self.exchange_seconds)
        self.exchange_seconds = 0.0
        self._samples.record_copy()
        if is_review(self._num_copies, self._num_first):
            self._steps_to_review = 1 + REVIEW_DELAY_STEPS
        if self._is_auto and self._num_copies < self._num_first:
            self.every = max(self.every, FIRST_SPACING_STEPS * self._stride)

    def record_device_wait(self, seconds: float) -> None:
        """Record how long the GPU waited for the next copy in order; 0.0 on a CPU."""
        if self._host_seconds:
            self._costs.append((self._host_seconds.popleft(), seconds))

    def review(self, commit_seconds: float) -> None:
        """Adjust the interval. Every rank must call it when `is_review_due`, with its last time to commit a copy."""
        self._steps_to_review = 0
        known = self._costs or [(each, 0.0) for each in self._host_seconds]
        counted = known if self._num_copies >= self._num_first else known[-1:]
        host, waits = (statistics.fmean(each) for each in zip(*counted, strict=True))
        mine = (host + max(waits, self._samples.slowdown())), self._samples.step_seconds(), commit_seconds
        if self._is_auto:
            slowest = self._gather(np.array([1e9 * each for each in mine], dtype=np.int64)).max(axis=0) / 1e9
            mine = tuple(float(each) for each in slowest)
        cost, step_seconds, commit = (Seconds(each) for each in mine)
        self.step_seconds, self.commit_seconds = step_seconds, commit
        if self._is_auto:
            self.every = copy_every(cost, step_seconds, lost_seconds=self._lost_seconds)
            first_spacing = FIRST_SPACING_STEPS * self._stride
            if self._num_copies < self._num_first and first_spacing * step_seconds <= self._lost_seconds:
                self.every = max(self.every, first_spacing)
        if self._num_copies >= self._num_first:
            self._samples.forget()
        if self._num_copies <= self._num_slots or self._num_copies >= self._num_first:
            self._costs.clear()


class CopyTime(Enum):
    """When a state is copied: before the first step, after a step as soon as there is memory for it, or not at all."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFacts:
    """What is known as training starts from a state, the same on all ranks.

    `has_memory`: whether there is memory for copies; None while it is being allocated. `is_copied`: all ranks hold a
    copy of this state. `tier` is where the state was restored from, `is_change` whether another plan held it before.
    `rewinds`: a NaN rewinds the run. `every_step`: each step is copied, or as many as cost little.
    """

    keeps_copies: bool
    has_memory: bool | None
    is_copied: bool
    tier: Literal["memory", "disk", "store"] | None
    is_change: bool
    rewinds: bool
    every_step: bool


def when_to_copy(facts: StartFacts) -> CopyTime:
    if not facts.keeps_copies or facts.is_copied or facts.has_memory is False:
        return CopyTime.NEVER
    if facts.has_memory:
        return CopyTime.NOW
    if facts.is_change:  # training does not wait for memory that is still being allocated
        return CopyTime.LATER
    if facts.tier == "memory" or facts.rewinds:
        return CopyTime.NOW
    # The state can be restored again. But if replicas differ, the run rewinds to this copy while there is no other.
    return CopyTime.LATER if facts.tier == "disk" or facts.every_step else CopyTime.NOW


class SaveSchedule:
    """Decides on rank 0 when to save a checkpoint. All ranks act on the decision `lead` steps later.

    `stride` is the number of steps between two at which the state may be saved.
    """

    def __init__(
        self,
        section: CheckpointSection,
        *,
        world_size: int,
        guess: SaveCost,
        stride: int = 1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every, self._stride, self._now = 0 if section.every == "off" else section.every, stride, now
        self._between = Faults(device_hours=section.device_hours, restart=Seconds(0.0)).seconds_between(world_size)
        self.lead = max(2, stride)
        self.cost, self.num_skipped = guess, 0
        self.begin()

    def begin(self) -> None:
        """Start counting now; a pending decision is dropped."""
        self._started, self._decided_step = self._now(), -self.lead

    @property
    def interval(self) -> Seconds:
        return save_interval(self.cost, between=self._between)

    def wants(self, step: int, *, busy: bool) -> bool:
        """Return whether to save the state `lead` steps after `step`. `busy`: the last checkpoint is still written."""
        if self._every == "auto":
            is_pending = step < self._decided_step + self.lead
            due = not is_pending and self._now() - self._started >= self.interval
        else:
            every, end = self._every, step + self.lead
            due = every != 0 and end // every > (end - self._stride) // every
        if due and busy:
            self.num_skipped += 1
            if self._every == "auto":  # the disk has become slower: decide again later
                waited = Seconds(self._now() - self._started)
                self.cost = SaveCost(stall=self.cost.stall, write=waited)
            return False
        if due:
            self._decided_step = step
        return due

    def max_repeated_steps(self, step_seconds: Seconds) -> int | None:
        """Return how many steps the newest checkpoint on disk is behind at most; None without regular checkpoints."""
        if self._every == 0:
            return None
        write_steps = math.ceil(self.cost.write / step_seconds)
        every = math.ceil(self.interval / step_seconds) if self._every == "auto" else self._every
        return max_repeated_steps(every, self._stride) + self.lead + write_steps

    def record_start(self) -> None:
        self._started = self._now()
