"""How long the trainer waited for batches, and how long loading them took."""

import time

from trimaran.data.loader_tuner import WINDOW_BATCHES, WINDOW_SECONDS, LoaderWindow


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
            self._restart()

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
        self._restart()
        return window

    def skip(self, batches: int) -> None:
        """Ignore the next batches: they were loaded with the previous setting."""
        self._skip, self._batches = batches, 0

    def stats(self) -> dict[str, float]:
        return {
            "waited_seconds": self._waited_seconds,
            "last_seconds": self.last_seconds,
            "load_seconds": self._load_seconds,
            "batch_bytes": self.batch_bytes,
        }

    def _restart(self) -> None:
        self._skip, self._batches, self._start = 0, 0, self._now()

    def _now(self) -> tuple[float, float, float, float]:
        return time.monotonic(), self._waited_seconds, self._load_seconds, self._landing_seconds
