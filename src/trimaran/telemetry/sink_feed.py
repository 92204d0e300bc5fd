"""Hands the lines of a run to a sink, whatever the sink does: it may raise, or never return."""

import logging
import threading
import time
from collections import deque

from trimaran.telemetry.sinks.sink import Line, Sink

log = logging.getLogger(__name__)

MOST_LINES = 10_000  # that wait for a sink; the oldest are lost
TRIES = 3  # for a line
FIRST_DELAY, MOST_DELAY = 1.0, 60.0  # seconds between them, doubled each time


class SinkFeed:
    """A sink and the thread that it works in. `put` returns at once."""

    def __init__(self, sink: Sink, *, first_delay: float = FIRST_DELAY) -> None:
        self.sink, self.lost = sink, 0
        self._first_delay = self._delay = first_delay
        self._told, self._closing = False, False
        self._lines: deque[tuple[str, Line]] = deque()
        self._woken = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def put(self, kind: str, line: Line) -> None:
        """Have the sink's method `kind` called with `line`, after all before it."""
        with self._woken:
            if len(self._lines) >= MOST_LINES:
                self._lines.popleft()
                self.lost += 1
            self._lines.append((kind, line))
            self._woken.notify()

    def close(self, *, seconds: float) -> bool:
        """Close the sink after the last line; return whether that was done within `seconds`."""
        with self._woken:
            self._closing = True
            self._woken.notify()
        self._thread.join(timeout=seconds)
        if self.lost:
            log.warning("sink %s lost %d lines", self.sink.name, self.lost)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            if not any(self._give(*entry) for _ in range(TRIES)):
                self.lost += 1
        try:
            self.sink.close()
        except Exception as error:
            self._tell(error)

    def _next(self) -> tuple[str, Line] | None:
        """Return the next line, waiting for one; None when there will be no more."""
        with self._woken:
            while not self._lines:
                if self._closing:
                    return None
                self._woken.wait()
            return self._lines.popleft()

    def _give(self, kind: str, line: Line) -> bool:
        try:
            getattr(self.sink, kind)(line)
        except Exception as error:  # whatever a sink raises is its own trouble
            self._tell(error)
            self._pause()
            return False
        if self._told:
            log.warning("sink %s works again, %d lines were lost", self.sink.name, self.lost)
        self._told, self._delay = False, self._first_delay
        return True

    def _tell(self, error: Exception) -> None:
        if not self._told:
            log.warning("sink %s failed: %s: %s", self.sink.name, type(error).__name__, error)
        self._told = True

    def _pause(self) -> None:
        until = time.monotonic() + self._delay
        self._delay = min(2 * self._delay, MOST_DELAY)
        while time.monotonic() < until and not self._closing:
            time.sleep(min(0.1, max(0.0, until - time.monotonic())))
