"""How long the launch of the next step may wait while a step is computed.

A request that arrives after the next step was launched waits for a whole step more. So the engine's caller may wait for
requests during the first part of a step.
"""

import time

WAITED_PART = 0.6  # of a step: the rest must be enough to plan and launch the next one
TOKENS_PER_KIND = 64  # steps with about as many tokens take about as long


class StepPace:
    """The seconds of steps by their number of tokens. Steps are computed one after another."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._last_end = 0.0

    def ended(self, num_tokens: int, launched_at: float) -> None:
        """Take note that a step of so many tokens, launched at a time of `time.perf_counter`, has ended now."""
        now, kind = time.perf_counter(), num_tokens // TOKENS_PER_KIND
        seconds = now - max(launched_at, self._last_end)
        known = self._seconds.get(kind, seconds)
        # Less counts at once: an estimate that is too long would leave the device idle.
        self._seconds[kind] = min(seconds, (known + seconds) / 2)
        self._last_end = now

    def spare_seconds(self, num_tokens: int, launched_at: float) -> float:
        """Return how long the step after this one need not be launched; 0 or less if it is time, or none is known."""
        seconds = self._seconds.get(num_tokens // TOKENS_PER_KIND, 0.0)
        return max(launched_at, self._last_end) + WAITED_PART * seconds - time.perf_counter()
