"""When to save and copy the state: often enough that a failure costs little, rarely enough that saving costs less."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trimaran.core import CheckpointSection, Seconds
from trimaran.cost.goodput import Faults, best_interval

MAX_STALL_FRACTION = 0.01
"""The largest fraction of training time that may be spent on writing the state to disk."""
MAX_COPY_FRACTION = 0.005
"""The largest fraction that copies in memory may take. With all other overhead of a run this stays below 1 %."""
MAX_BOUNDED_COPY_FRACTION = 0.01
"""The same where fewer copies would lose more than the recipe's `checkpoint.lost_seconds` after a fault."""
MAX_INTERVAL = Seconds(1800.0)
UNBOUNDED = Seconds(math.inf)
MAX_TIMED_STEPS = 1000
REVIEW_AFTER_COPIES = (3, 8, 32, 128)
"""After this many copies the interval between them is adjusted, then after each further multiple of the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """The cost of a checkpoint: how long it stalls training, and how long until it is on disk."""

    stall: Seconds
    write: Seconds


def save_interval(cost: SaveCost, *, between: Seconds) -> Seconds:
    """Return the time between the starts of two checkpoints; `between` is the mean time between failures.

    It is Daly's optimum, within limits: training is stalled at most 1 % of the time, and the disk is busy at most half
    of it. It is at most half an hour, unless one of these limits needs more.
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
        return self.steps != other.steps or any(_differs(mine, its) for mine, its in pairs)

    def as_dict(self) -> dict[str, float | None]:
        """Return the data of a `loss_bound` event."""
        seconds = {name: None if each is None else float(f"{each:.3g}") for name, each in
                   (("seconds", self.seconds), ("node_seconds", self.node_seconds))}  # fmt: skip
        return {"steps": self.steps, "node_steps": self.node_steps, **seconds}


def _differs(seconds: Seconds | None, other: Seconds | None) -> bool:
    if seconds is None or other is None:
        return seconds is not other
    return abs(seconds - other) > 0.25 * other


def copy_every(stall: Seconds, step: Seconds, *, lost_seconds: Seconds = UNBOUNDED) -> int:
    """Return the number of steps between two copies, for copies that stall training this long and steps this long.

    Copies take at most `MAX_COPY_FRACTION` of the time. If a fault could then cost more than `lost_seconds`, they are
    made more often, until it cannot or until they take `MAX_BOUNDED_COPY_FRACTION` of the time.
    """
    if not step:
        return 1
    cheap, dearest = (
        max(1, math.ceil(stall / (each * step))) for each in (MAX_COPY_FRACTION, MAX_BOUNDED_COPY_FRACTION)
    )
    within = max(1, math.floor(lost_seconds / step) - 1) if math.isfinite(lost_seconds) else cheap
    return min(cheap, max(within, dearest))


def max_repeated_steps(every: int, stride: int = 1) -> int:
    """Return how many finished steps a fault costs at most if the state is copied every `every` steps.

    One interval, since a copy counts only once every rank has it, and one more step: the next one may end while the
    last copy is being committed, or before the metrics of its step are written (see `Restorer.load`). `stride` is as
    in `SaveSchedule`.
    """
    return -(-every // stride) * stride + stride


def is_review(num_copies: int) -> bool:
    """Return whether to adjust the interval after this many copies."""
    return num_copies in REVIEW_AFTER_COPIES or (num_copies > 0 and num_copies % REVIEW_AFTER_COPIES[-1] == 0)


class CopySchedule:
    """Decides when to copy the state to memory, equally on all ranks: now and then they exchange what copies cost.

    `gather` is as in `checkpoint.ownership`. `every` 0 means never. The first `warm_up` copies are not timed: the first
    copy to a slot creates views and maps pages, and takes several times as long as later ones.
    """

    def __init__(
        self,
        every: Literal["auto"] | int,
        gather: Callable[[np.ndarray], np.ndarray],
        *,
        lost_seconds: Seconds = UNBOUNDED,
        warm_up: int = 0,
    ) -> None:
        self.every = 1 if every == "auto" else every
        self.step_seconds = Seconds(0.0)
        """The median duration of a step, that of the first step at first, and 0.0 before it."""
        self._is_auto, self._gather, self._lost_seconds = every == "auto", gather, lost_seconds
        self._last_step, self._num_copies = 0, -warm_up
        self._step_seconds: deque[float] = deque(maxlen=MAX_TIMED_STEPS)
        self._stall_seconds: list[float] = []

    def begin(self, step: int) -> None:
        """Start counting at `step`."""
        self._last_step = step

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step - self._last_step >= self.every

    def record_step(self, seconds: float) -> None:
        """Record the duration of a step, without the time spent on checkpoints."""
        self._step_seconds.append(seconds)
        self.step_seconds = self.step_seconds or Seconds(seconds)

    def record_copy(self, step: int, stall_seconds: float) -> None:
        """Record a copy. Every rank must call it at the same step, since the ranks may exchange their costs in it."""
        self._last_step = step
        self._num_copies += 1
        if self._num_copies > 0:
            self._stall_seconds.append(stall_seconds)
        if not is_review(self._num_copies) or not self._step_seconds:
            return
        self.step_seconds = Seconds(statistics.median(self._step_seconds))
        if self._is_auto:
            medians = statistics.median(self._stall_seconds), self.step_seconds
            slowest = self._gather(np.array([1e9 * each for each in medians], dtype=np.int64)).max(axis=0) / 1e9
            stall, step_seconds = (Seconds(float(each)) for each in slowest)
            self.every = copy_every(stall, step_seconds, lost_seconds=self._lost_seconds)
        self._step_seconds.clear()
        self._stall_seconds.clear()


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
        self._every, self._stride, self._now = section.every, stride, now
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
        due = self._is_time(step) if self._every == "auto" else self._is_turn(step, self._every)
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
        """Record that a checkpoint starts."""
        self._started = self._now()

    def record_cost(self, cost: SaveCost) -> None:
        """Record the cost of a checkpoint."""
        self.cost = cost

    def _is_turn(self, step: int, every: int) -> bool:
        end = step + self.lead
        return every != 0 and end // every > (end - self._stride) // every

    def _is_time(self, step: int) -> bool:
        is_pending = step < self._decided_step + self.lead
        return not is_pending and self._now() - self._started >= self.interval
