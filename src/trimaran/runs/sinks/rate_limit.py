"""Limits how many steps per second are sent to chart libraries."""

from trimaran.runs.sinks.sink import Line

MAX_STEPS_PER_SECOND = 20  # logging one takes a chart library up to 0.5 ms, and the sidecar must stay cheap


class RateLimit:
    """Passes lines that are far enough apart in time. `held` is the last line that did not pass."""

    def __init__(self, max_per_second: float = MAX_STEPS_PER_SECOND) -> None:
        self._seconds = 1.0 / max_per_second
        self._passed = 0.0
        self.held: Line | None = None

    def passes(self, line: Line) -> bool:
        """Whether to log `line`: it is far enough from the previous one, or has the rare group metrics."""
        when = line.get("time", 0.0)
        if 0.0 <= when - self._passed < self._seconds and "groups" not in line:
            self.held = line
            return False
        self._passed, self.held = when, None
        return True
