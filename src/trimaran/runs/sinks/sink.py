"""What sinks share: their methods, the identity of a run, limits of rate, reported incidents, and a thread for each."""

import hashlib
import json
import logging
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

from trimaran.core import read_regular_bytes, read_regular_text, write_atomically
from trimaran.runs.record_types import DAMAGED
from trimaran.runs.run_directory import MARKER, RunDirectory

log = logging.getLogger(__name__)


Line = dict[str, Any]


class Sink(Protocol):
    """Receives the lines of one run. A method may raise: the error is logged once, and other sinks are not affected."""

    name: str

    def step(self, line: Line) -> None:
        """Receive a line of `metrics.jsonl`."""

    def event(self, line: Line) -> None:
        """Receive a line of `events/rank-N.jsonl`, of any rank."""

    def incident(self, line: Line) -> None:
        """Receive a line of `incidents.jsonl`."""

    def sample(self, line: Line) -> None:
        """Receive a line of `telemetry/node-N.jsonl`."""

    def close(self) -> None:
        """Release resources: the run has ended, or a new sidecar will open a new sink."""


def run_id(run: RunDirectory) -> str:
    """Return a unique ID of the run, which stays the same when it is resumed."""
    try:
        identity = read_regular_bytes(run.path / MARKER)
    except OSError:
        identity = str(run.location).encode()
    return f"{run.location.name[:40]}-{hashlib.sha256(identity).hexdigest()[:8]}"


def run_settings(run: RunDirectory) -> dict[str, Any]:
    """Return the recipe and the plan; nothing about the machine or its environment."""
    plan = json.loads(read_regular_text(run.plan))
    return {"recipe": run.read_recipe().model_dump(mode="json"), "plan": plan.get("plan", {})}


class ReportedIncidents:
    """The incidents that a sink has reported, with the action they had then."""

    def __init__(self, run: RunDirectory, sink: str) -> None:
        self._path = run.path / "telemetry" / f"told-{sink}.json"
        self._keys: set[str] = set()
        with suppress(*DAMAGED):
            self._keys |= {each for each in json.loads(read_regular_text(self._path)) if isinstance(each, str)}

    def contains(self, incident: Line) -> bool:
        return f"{incident.get('id')} {incident.get('action')}" in self._keys

    def add(self, incident: Line) -> None:
        """Mark the incident as reported, also for later sinks of this name."""
        self._keys.add(f"{incident.get('id')} {incident.get('action')}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(sorted(self._keys)) + "\n")


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
            until = time.monotonic() + self._delay
            self._delay = min(2 * self._delay, MAX_RETRY_SECONDS)
            while time.monotonic() < until and not self._closing:
                time.sleep(min(0.1, max(0.0, until - time.monotonic())))
            return False
        if self._is_failing:
            log.warning("sink %s works again, %d lines were lost", self.sink.name, self.lost)
        self._is_failing, self._delay = False, self._first_delay
        return True

    def _warn_once(self, error: Exception) -> None:
        if not self._is_failing:
            log.warning("sink %s failed: %s: %s", self.sink.name, type(error).__name__, error)
        self._is_failing = True
