"""How many processes load, how far ahead, and whether into pinned memory: chosen from what the trainer waited.

A batch is a function of its step, so all of this may change while a run goes on, and no batch is lost or repeated.
"""

import math
import os
from dataclasses import dataclass, field, replace

import psutil

from trimaran.core import UserError

AHEAD = 2  # batches that are ready or on their way, besides one for each process
MAX_AHEAD = 32
WINDOW_SECONDS, WINDOW_BATCHES = 2.0, 8  # what is looked at before anything is changed
WAITING = 0.02  # share of the time spent waiting for data that is worth a change
WAITING_SECONDS = 0.0005  # a batch; less is the price of handing it over
CALM = 0.002  # share of the time below which nothing is missed
MARGIN = 1.25  # loading power over what is needed on average
BETTER = 0.9  # of the waiting for a batch may be left at most, or what was added is taken away again
PATIENCE = 4  # calm windows before a process is ended
MEMORY_SHARE = 0.25  # of the free memory that batches may take
PINNED_SHARE = 0.125  # of the free memory that may be pinned: the system cannot move it


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderLimits:
    """What loading may take of this machine, for one rank: cores besides the one that it computes on, and bytes."""

    cores: int
    free_bytes: int
    pin_memory: bool = False

    @property
    def memory_bytes(self) -> int:
        return int(self.free_bytes * MEMORY_SHARE)


def loader_limits_here() -> LoaderLimits:
    """Return half of what is free on this machine now, for a loader that nobody gave a room."""
    return LoaderLimits(cores=len(os.sched_getaffinity(0)) // 2, free_bytes=psutil.virtual_memory().available // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How batches are loaded now. `workers` 0 is a thread; `depth` counts batches that are asked for or ready."""

    workers: int
    depth: int
    pin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What happened in a stretch of training: how long it was, and how much of that the trainer waited for batches.

    `load_seconds` were spent loading, in all processes together, and `landing_seconds` on bringing what they loaded
    into this one. `batch_bytes` is the largest batch.
    """

    batches: int
    seconds: float
    waited_seconds: float
    load_seconds: float
    landing_seconds: float
    batch_bytes: int


@dataclass(frozen=True, slots=True)
class LoaderChange:
    """A new setting, from `step` on, and why."""

    step: int
    setting: Setting
    reason: str


@dataclass(slots=True)
class Tuner:
    """Chooses the next setting. What did not help is taken back and not tried again soon, so it comes to rest."""

    room: LoaderLimits
    setting: Setting
    fixed: bool = False
    _before: tuple[Setting, float] | None = (
        None  # the last setting with fewer processes, and the seconds a batch waited then
    )
    _calm: int = 0
    _patience: int = PATIENCE
    _ended: bool = False  # a process, since the last was added
    _pause: int = 0  # windows in which no process is added
    _next_pause: int = field(default=PATIENCE)

    def choose(self, seen: Seen) -> tuple[Setting, str] | None:
        """Return what to change to after what was seen, and why; None: all is well, or nothing helps."""
        if self.fixed:
            return None
        found = self._choose(seen, seen.waited_seconds / max(seen.seconds, 1e-9))
        if found is None or found[0] == self.setting:
            return None
        self.setting = found[0]
        return found

    def _choose(self, seen: Seen, share: float) -> tuple[Setting, str] | None:
        self._pause = max(0, self._pause - 1)
        before, self._before = self._before, None
        if share <= WAITING or seen.waited_seconds < WAITING_SECONDS * seen.batches:
            return self._less(seen, share)
        self._calm = 0
        told = f"{share:.0%} of the time was spent waiting for batches"
        if before is not None and seen.waited_seconds / seen.batches > before[1] * BETTER:
            self._pause, self._next_pause = self._next_pause, 2 * self._next_pause
            return before[0], f"{told}: more processes did not help"
        return self._more(seen, told)

    def _more(self, seen: Seen, told: str) -> tuple[Setting, str] | None:
        now = self.setting
        busy = seen.seconds - seen.waited_seconds
        if now.pin and seen.landing_seconds > busy / 2:
            return replace(
                now, pin=False
            ), f"{told}, and pinning took {seen.landing_seconds / seen.batches:.3f} s a batch"
        wanted = math.ceil(MARGIN * seen.load_seconds / max(busy, 1e-9))
        workers = min(self.room.cores, max(now.workers + 1, wanted), self._workers_in_memory(seen.batch_bytes))
        too_slow = wanted > now.workers or now.workers == 0
        if too_slow and workers > now.workers and not self._pause:
            self._before = (now, seen.waited_seconds / seen.batches)
            # A process that was ended too early is worth having: be slower to end one next time.
            self._patience, self._ended = self._patience * (2 if self._ended else 1), False
            return self._fitting(replace(now, workers=workers, depth=workers + AHEAD), seen), told
        if wanted > max(1, now.workers):
            return None  # waiting is what is left: batches ahead do not come sooner by asking for more of them
        deeper = self._fitting(replace(now, depth=min(2 * now.depth, MAX_AHEAD)), seen)
        return (deeper, f"{told}, though loading is quick enough on average") if deeper.depth > now.depth else None

    def _less(self, seen: Seen, share: float) -> tuple[Setting, str] | None:
        """Return one process less when it has not been needed for a while."""
        busy = max(seen.seconds - seen.waited_seconds, 1e-9)
        needed = max(1, math.ceil(MARGIN * seen.load_seconds / busy))
        self._calm = self._calm + 1 if share < CALM and needed < self.setting.workers else 0
        if self._calm < self._patience:
            return None
        self._calm, self._ended = 0, True
        fewer = replace(self.setting, workers=self.setting.workers - 1)
        return fewer, f"{needed} of {self.setting.workers} processes are enough"

    def first(self, batch_bytes: int) -> Setting:
        """Return what to do once the size of a batch is known. More than there is memory for is a person's mistake."""
        need = batch_bytes * (self.setting.depth + 3 * self.setting.workers)
        if (need if self.fixed else 2 * batch_bytes) > self.room.free_bytes:
            raise _too_large(self.setting, batch_bytes, self.room)
        seen = Seen(batches=1, seconds=0, waited_seconds=0, load_seconds=0, landing_seconds=0, batch_bytes=batch_bytes)
        self.setting = self._fitting(self.setting, seen)
        return self.setting

    def _fitting(self, setting: Setting, seen: Seen) -> Setting:
        """Return the setting with no more batches ahead than memory has room for, and pinned if that is wise."""
        depth = max(1, min(setting.depth, self.room.memory_bytes // max(1, seen.batch_bytes)))
        pinned = depth * seen.batch_bytes <= PINNED_SHARE * self.room.free_bytes
        return replace(setting, depth=depth, pin=setting.pin and pinned)

    def _workers_in_memory(self, batch_bytes: int) -> int:
        """A process has a batch of its own and two in shared memory, and one more is on its way or ready."""
        return max(1, self.room.memory_bytes // max(1, 4 * batch_bytes))


def _too_large(setting: Setting, batch_bytes: int, room: LoaderLimits) -> UserError:
    gib, free = batch_bytes / 2**30, room.free_bytes / 2**30
    who = f"{setting.workers} loader processes" if setting.workers else "the loader"
    fewer = "set data.workers to auto or to fewer, or make" if setting.workers else "make"
    return UserError("T060", f"{who} and {setting.depth} batches ahead need more than the {free:.1f} GiB of memory "
                     f"that this rank may take: one step's batch has {gib:.2f} GiB", where="data.workers",
                     fix=f"{fewer} train.global_batch, data.seq_len or data.samples.max_pixels smaller")  # fmt: skip
