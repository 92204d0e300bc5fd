"""Chooses the number of loader processes, the prefetch depth and pinning from how long the trainer waits.

A batch depends only on its step, so the setting may change during a run without losing or repeating a batch.
"""

import math
import time
from dataclasses import dataclass, replace

from trimaran.core import UserError

EXTRA_BATCHES_AHEAD = 2  # batches ready or being loaded, besides one per process
MAX_BATCHES_AHEAD = 32
WINDOW_SECONDS, WINDOW_BATCHES = 2.0, 8  # minimum length of a measurement window
MIN_WAIT_FRACTION = 0.02  # of the time; a smaller wait for data causes no change
MIN_WAIT_SECONDS_PER_BATCH = 0.0005  # handing over a batch takes about this long anyway
CALM_WAIT_FRACTION = 0.002  # of the time; below this no process is missing
LOAD_MARGIN = 1.25  # loading capacity over the average need
MAX_REMAINING_WAIT_FRACTION = 0.9  # of the wait per batch after adding processes; above this they are removed again
CALM_WINDOWS_BEFORE_SHRINK = 4  # calm windows before a process is removed
MEMORY_FRACTION = 0.25  # of the free memory that batches may use
PINNED_FRACTION = 0.125  # of the free memory that may be pinned


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderLimits:
    """What one rank's loader may use of this machine: cores besides the rank's own, and memory."""

    cores: int
    free_bytes: int
    pin_memory: bool = False

    @property
    def memory_bytes(self) -> int:
        return int(self.free_bytes * MEMORY_FRACTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSetting:
    """How batches are loaded. `workers` 0 is a thread; `depth` counts batches that are requested or ready."""

    workers: int
    depth: int
    pin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWindow:
    """Measurements of one window of training: its length and the trainer's wait for batches.

    `load_seconds` is the loading time summed over all processes, `landing_seconds` the time to copy batches into this
    process. `batch_bytes` is the largest batch.
    """

    batches: int
    seconds: float
    waited_seconds: float
    load_seconds: float
    landing_seconds: float
    batch_bytes: int


@dataclass(frozen=True, slots=True)
class LoaderChange:
    """A new setting that applies from `step` on, and the reason for it."""

    step: int
    setting: LoaderSetting
    reason: str


@dataclass(slots=True)
class LoaderTuner:
    """Chooses the next setting. A change that did not help is reverted and not retried soon, so the tuner settles."""

    limits: LoaderLimits
    setting: LoaderSetting
    fixed: bool = False
    # The last setting with fewer processes, and the wait per batch in seconds with it.
    _before_growth: tuple[LoaderSetting, float] | None = None
    _calm_windows: int = 0
    _calm_windows_needed: int = CALM_WINDOWS_BEFORE_SHRINK
    _shrunk: bool = False  # whether a process was removed since the last one was added
    _pause: int = 0  # windows in which no process is added
    _next_pause: int = CALM_WINDOWS_BEFORE_SHRINK

    def choose(self, window: LoaderWindow) -> tuple[LoaderSetting, str] | None:
        """Return the next setting and the reason for it; None if nothing should change."""
        if self.fixed:
            return None
        wait_fraction = window.waited_seconds / max(window.seconds, 1e-9)
        self._pause = max(0, self._pause - 1)
        before, self._before_growth = self._before_growth, None
        short_waits = window.waited_seconds < MIN_WAIT_SECONDS_PER_BATCH * window.batches
        if wait_fraction <= MIN_WAIT_FRACTION or short_waits:
            # Remove a process once it was not needed for several windows.
            busy = max(window.seconds - window.waited_seconds, 1e-9)
            needed = max(1, math.ceil(LOAD_MARGIN * window.load_seconds / busy))
            calm = wait_fraction < CALM_WAIT_FRACTION and needed < self.setting.workers
            self._calm_windows = self._calm_windows + 1 if calm else 0
            if self._calm_windows < self._calm_windows_needed:
                return None
            self._calm_windows, self._shrunk = 0, True
            fewer = replace(self.setting, workers=self.setting.workers - 1)
            chosen = fewer, f"{needed} of {self.setting.workers} processes are enough"
        else:
            self._calm_windows = 0
            reason = f"{wait_fraction:.0%} of the time was spent waiting for batches"
            if before is not None and window.waited_seconds / window.batches > before[1] * MAX_REMAINING_WAIT_FRACTION:
                self._pause, self._next_pause = self._next_pause, 2 * self._next_pause
                chosen = before[0], f"{reason}: more processes did not help"
            else:
                chosen = self._grow(window, reason)
        if chosen is None or chosen[0] == self.setting:
            return None
        self.setting = chosen[0]
        return chosen

    def _grow(self, window: LoaderWindow, reason: str) -> tuple[LoaderSetting, str] | None:
        now = self.setting
        busy = window.seconds - window.waited_seconds
        if now.pin and window.landing_seconds > busy / 2:
            pin_seconds = window.landing_seconds / window.batches
            return replace(now, pin=False), f"{reason}, and pinning took {pin_seconds:.3f} s a batch"
        wanted = math.ceil(LOAD_MARGIN * window.load_seconds / max(busy, 1e-9))
        # Each worker needs memory for one batch of its own, two in shared memory and one ready.
        in_memory = max(1, self.limits.memory_bytes // max(1, 4 * window.batch_bytes))
        workers = min(self.limits.cores, max(now.workers + 1, wanted), in_memory)
        too_slow = wanted > now.workers or now.workers == 0
        if too_slow and workers > now.workers and not self._pause:
            self._before_growth = (now, window.waited_seconds / window.batches)
            # A process that was removed is needed again: wait longer before removing one next time.
            self._calm_windows_needed, self._shrunk = self._calm_windows_needed * (2 if self._shrunk else 1), False
            grown = replace(now, workers=workers, depth=workers + EXTRA_BATCHES_AHEAD)
            return self._fitting(grown, window.batch_bytes), reason
        if wanted > max(1, now.workers):
            return None  # loading is too slow on average, so a deeper queue does not help
        deeper = self._fitting(replace(now, depth=min(2 * now.depth, MAX_BATCHES_AHEAD)), window.batch_bytes)
        return (deeper, f"{reason}, though loading is fast enough on average") if deeper.depth > now.depth else None

    def set_batch_bytes(self, batch_bytes: int) -> LoaderSetting:
        """Return the setting once the size of a batch is known. Raises if the batches do not fit in memory."""
        need = batch_bytes * (self.setting.depth + 3 * self.setting.workers)
        if (need if self.fixed else 2 * batch_bytes) > self.limits.free_bytes:
            gib, free, now = batch_bytes / 2**30, self.limits.free_bytes / 2**30, self.setting
            loader = f"{now.workers} loader processes" if now.workers else "the loader"
            fewer = "set data.workers to auto or to fewer, or make" if now.workers else "make"
            raise UserError(
                "T060.batches-ahead-need",
                where="data.workers",
                loader=loader,
                depth=now.depth,
                free=free,
                gib=gib,
                fewer=fewer,
            )
        self.setting = self._fitting(self.setting, batch_bytes)
        return self.setting

    def _fitting(self, setting: LoaderSetting, batch_bytes: int) -> LoaderSetting:
        """Return the setting with its depth limited to the memory, and without pinning if that would pin too much."""
        depth = max(1, min(setting.depth, self.limits.memory_bytes // max(1, batch_bytes)))
        pinned = depth * batch_bytes <= PINNED_FRACTION * self.limits.free_bytes
        return replace(setting, depth=depth, pin=setting.pin and pinned)


class LoaderWaits:
    """Totals over a run, read in windows. The loading thread calls `record_load`; the trainer calls everything else."""

    def __init__(self) -> None:
        self.batch_bytes = 0
        self.last_seconds = 0.0  # wait for the last batch
        self._load_seconds = self._landing_seconds = self._waited_seconds = 0.0
        self._skip, self._batches, self._start = 1, 0, (0.0, 0.0, 0.0, 0.0)  # the wait for the first batch is expected
        self._has_first = False

    def record_load(self, seconds: float, landing_seconds: float, num_bytes: int) -> None:
        """Record a batch that took `seconds` to load and `landing_seconds` to copy into this process."""
        self._load_seconds += seconds
        self._landing_seconds += landing_seconds
        self.batch_bytes = max(self.batch_bytes, num_bytes)

    def record_wait(self, began: float) -> None:
        """Record that the trainer received the batch it has waited for since `began` (monotonic clock)."""
        seconds = time.monotonic() - began
        # The first batch could not have been ready earlier.
        self.last_seconds = seconds if self._has_first else 0.0
        self._has_first = True
        self._waited_seconds += seconds
        self._batches += 1
        if self._batches == self._skip:
            self._skip, self._batches, self._start = 0, 0, self._now()

    def window(self) -> LoaderWindow | None:
        """Return the measurements since the last window; None until there are enough of them."""
        if self._skip or self._batches < WINDOW_BATCHES or time.monotonic() - self._start[0] < WINDOW_SECONDS:
            return None
        seconds, waited, loading, landing = (now - before for now, before in zip(self._now(), self._start, strict=True))
        window = LoaderWindow(
            batches=self._batches,
            seconds=seconds,
            waited_seconds=waited,
            load_seconds=loading,
            landing_seconds=landing,
            batch_bytes=self.batch_bytes,
        )
        self._skip, self._batches, self._start = 0, 0, self._now()
        return window

    def skip(self, batches: int) -> None:
        """Ignore the next batches: they were loaded with the previous setting."""
        self._skip, self._batches = batches, 0

    def stats(self) -> dict[str, float]:
        seconds = {"waited_seconds": self._waited_seconds, "last_seconds": self.last_seconds}
        return seconds | {"load_seconds": self._load_seconds, "batch_bytes": self.batch_bytes}

    def _now(self) -> tuple[float, float, float, float]:
        return time.monotonic(), self._waited_seconds, self._load_seconds, self._landing_seconds
