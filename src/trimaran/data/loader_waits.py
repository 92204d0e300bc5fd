"""How long a trainer waited for its batches, and what loading them took."""

import time

from trimaran.data.loader_tuner import WINDOW_BATCHES, WINDOW_SECONDS, Seen


class LoaderWaits:
    """Sums over a run, read in windows. The thread that loads calls `loaded`, the one that trains all the rest."""

    def __init__(self) -> None:
        self.batch_bytes = 0
        self.last_seconds = 0.0  # that the last batch was waited for
        self._load_seconds = self._landing_seconds = self._waited_seconds = 0.0
        self._skip, self._batches, self._start = 1, 0, (0.0, 0.0, 0.0, 0.0)  # the first batch is nobody's delay
        self._seen = False

    def loaded(self, seconds: float, landing_seconds: float, num_bytes: int) -> None:
        """Note a batch that took `seconds` to load and then `landing_seconds` to bring into this process."""
        self._load_seconds += seconds
        self._landing_seconds += landing_seconds
        self.batch_bytes = max(self.batch_bytes, num_bytes)

    def took(self, began: float) -> None:
        """Note that the trainer has the batch that it wanted at `began` (monotonic clock)."""
        seconds = time.monotonic() - began
        # The first could not be there any sooner.
        self.last_seconds = seconds if self._seen else 0.0
        self._seen = True
        self._waited_seconds += seconds
        self._batches += 1
        if self._batches == self._skip:
            self._restart()

    def window(self) -> Seen | None:
        """Return what was seen since the last window, once that is enough to judge by."""
        if self._skip or self._batches < WINDOW_BATCHES or time.monotonic() - self._start[0] < WINDOW_SECONDS:
            return None
        seconds, waited, loading, landing = (now - before for now, before in zip(self._now(), self._start, strict=True))
        seen = Seen(
            batches=self._batches,
            seconds=seconds,
            waited_seconds=waited,
            load_seconds=loading,
            landing_seconds=landing,
            batch_bytes=self.batch_bytes,
        )
        self._restart()
        return seen

    def settle(self, batches: int) -> None:
        """Leave the next batches out: they were loaded in the way that was just changed."""
        self._skip, self._batches = batches, 0

    def facts(self) -> dict[str, float]:
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
