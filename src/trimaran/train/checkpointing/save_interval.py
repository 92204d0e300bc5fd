"""How often the state is kept: so often that a failure costs little, so seldom that keeping it costs less."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trimaran.core import CheckpointSection, Seconds
from trimaran.cost.goodput import Faults, best_interval

SHARE = 0.01
"""The most of the time of training that may be spent on writing its state to disk."""
COPY_SHARE = 0.005
"""The most that may be spent on copies in memory: with all else that a run does beside training it stays below 1 %."""
LONGEST = Seconds(1800.0)
LOOKS = (3, 8, 32, 128)
"""After so many copies in memory their pace is looked at, and then each time there are as many again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """What a checkpoint takes: how long training stands still, and how long until it is on disk."""

    stall: Seconds
    write: Seconds


def save_interval(cost: SaveCost, *, between: Seconds) -> Seconds:
    """Return the time between the starts of two checkpoints, where `between` is the mean time between failures.

    It is Daly's optimum, but never so short that training stands still for more than a hundredth of the time, or that
    the disk is busy for more than half of it; and never longer than half an hour unless one of these wants it.
    """
    best = best_interval(cost.stall, between, restart=Seconds(0.0))
    return Seconds(max(cost.stall / SHARE, 2 * cost.write, min(best, LONGEST)))


def copy_every(stall: Seconds, step: Seconds) -> int:
    """Return after how many steps to copy, so that the copies take at most a two-hundredth of the time."""
    return max(1, math.ceil(stall / (COPY_SHARE * step))) if step else 1


def is_look(num_copies: int) -> bool:
    """Return whether to look again at how often is copied."""
    return num_copies in LOOKS or (num_copies > 0 and num_copies % LOOKS[-1] == 0)


class CopyPace:
    """Says when to copy the state to memory, alike on all ranks: now and then they compare what copies cost them.

    `gather` is as in `checkpoint.ownership`. `wanted` 0 is never.
    """

    def __init__(self, wanted: Literal["auto"] | int, gather: Callable[[np.ndarray], np.ndarray]) -> None:
        self.every = 1 if wanted == "auto" else wanted
        self._is_free, self._gather = wanted == "auto", gather
        self._last, self._num_copies = 0, 0
        self._steps: list[float] = []
        self._stalls: list[float] = []

    def begin(self, step: int) -> None:
        """Count from `step` on."""
        self._last = step

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step - self._last >= self.every

    def stepped(self, seconds: float) -> None:
        """Take note of how long a step took, without what this room took of it."""
        self._steps.append(seconds)

    def copied(self, step: int, stall_seconds: float) -> None:
        """Take note of a copy. Every rank calls it at the same step, since the ranks may compare notes in it."""
        self._last = step
        self._num_copies += 1
        self._stalls.append(stall_seconds)
        if self._is_free and is_look(self._num_copies) and self._steps:
            seen = [statistics.median(each) for each in (self._stalls, self._steps)]
            slowest = self._gather(np.array([1e9 * each for each in seen], dtype=np.int64)).max(axis=0) / 1e9
            self.every = copy_every(Seconds(float(slowest[0])), Seconds(float(slowest[1])))
            self._steps.clear()
            self._stalls.clear()


class SavePace:
    """Says on rank 0 when a checkpoint is wanted. What it says is acted upon `lead` steps later, by all ranks.

    `stride` is how many steps there are between two at which the state may be kept.
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
        """Count from now on; what was wished for before is forgotten."""
        self._started, self._wished = self._now(), -self.lead

    @property
    def interval(self) -> Seconds:
        return save_interval(self.cost, between=self._between)

    def wants(self, step: int, *, busy: bool) -> bool:
        """Return whether to keep the state `lead` steps after `step`. `busy`: the last checkpoint is not yet done."""
        due = self._is_time(step) if self._every == "auto" else self._is_turn(step, self._every)
        if due and busy:
            self.num_skipped += 1
            if self._every == "auto":  # the disk is slower than it was: ask again later
                waited = Seconds(self._now() - self._started)
                self.cost = SaveCost(stall=self.cost.stall, write=waited)
            return False
        if due:
            self._wished = step
        return due

    def started(self) -> None:
        """Take note that a checkpoint begins."""
        self._started = self._now()

    def ended(self, cost: SaveCost) -> None:
        """Take note of what a checkpoint took."""
        self.cost = cost

    def _is_turn(self, step: int, every: int) -> bool:
        end = step + self.lead
        return every != 0 and end // every > (end - self._stride) // every

    def _is_time(self, step: int) -> bool:
        on_its_way = step < self._wished + self.lead
        return not on_its_way and self._now() - self._started >= self.interval
