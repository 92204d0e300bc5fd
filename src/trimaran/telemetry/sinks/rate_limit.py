"""Steps for charts: not more in a second than a chart can show, whatever a run does."""

from trimaran.telemetry.sinks.sink import Line

MOST_A_SECOND = 20  # a line costs a chart library up to half a millisecond, and the sidecar must stay cheap


class RateLimit:
    """Lets lines pass that are far enough apart. The last one that was held back is `held`."""

    def __init__(self, most_a_second: float = MOST_A_SECOND) -> None:
        self._seconds = 1.0 / most_a_second
        self._passed = 0.0
        self.held: Line | None = None

    def passes(self, line: Line) -> bool:
        """Return whether to draw `line`: one at least that far from the one before, or that counts what is rare."""
        when = line.get("time", 0.0)
        if 0.0 <= when - self._passed < self._seconds and "groups" not in line:
            self.held = line
            return False
        self._passed, self.held = when, None
        return True
