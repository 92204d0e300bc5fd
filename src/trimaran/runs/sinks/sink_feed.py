"""Feeds the lines of a run to a sink in its own thread, so that a sink may raise or hang."""

import logging
import threading
import time
from collections import deque

from trimaran.runs.sinks.sink import Line, Sink

log = logging.getLogger(__name__)

MAX_QUEUED_LINES = 10_000  # beyond that the oldest are dropped
MAX_TRIES = 3  # per line
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0  # the delay doubles each time


class SinkFeed:
    """A sink with its queue and thread. `put` returns at once."""

    def __init__(
        self, sink: Sink, *, first_delay: float = FIRST_RETRY_SECONDS, max_queued: int = MAX_QUEUED_LINES
    ) -> None:
        self.sink, self.lost, self._max_queued = sink, 0, max_queued
        self._first_delay = self._delay = first_delay
        self._is_failing, self._closing = False, False
        self._lines: deque[tuple[str, Line]] = deque()
        self._woken = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def put(self, kind: str, line: Line) -> None:
        """Queue a call of the sink's method `kind` with `line`."""
        with self._woken:
            if len(self._lines) >= self._max_queued:
                self._lines.popleft()
                self.lost += 1
            self._lines.append((kind, line))
            self._woken.notify()

    def close(self, *, seconds: float) -> bool:
        """Close the sink after the last line; return whether it closed within `seconds`."""
        with self._woken:
            self._closing = True
            self._woken.notify()
        self._thread.join(timeout=seconds)
        if self.lost:
            log.warning("sink %s lost %d lines", self.sink.name, self.lost)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            if not any(self._deliver(*entry) for _ in range(MAX_TRIES)):
                self.lost += 1
        try:
            self.sink.close()
        except Exception as error:
            self._warn_once(error)

    def _next(self) -> tuple[str, Line] | None:
        """Wait for the next line; None if the feed is closing and the queue is empty."""
        with self._woken:
            while not self._lines:
                if self._closing:
                    return None
                self._woken.wait()
            return self._lines.popleft()

    def _deliver(self, kind: str, line: Line) -> bool:
        try:
            getattr(self.sink, kind)(line)
        except Exception as error:  # a sink may raise anything
            self._warn_once(error)
            self._wait_before_retry()
            return False
        if self._is_failing:
            log.warning("sink %s works again, %d lines were lost", self.sink.name, self.lost)
        self._is_failing, self._delay = False, self._first_delay
        return True

    def _warn_once(self, error: Exception) -> None:
        if not self._is_failing:
            log.warning("sink %s failed: %s: %s", self.sink.name, type(error).__name__, error)
        self._is_failing = True

    def _wait_before_retry(self) -> None:
        until = time.monotonic() + self._delay
        self._delay = min(2 * self._delay, MAX_RETRY_SECONDS)
        while time.monotonic() < until and not self._closing:
            time.sleep(min(0.1, max(0.0, until - time.monotonic())))
