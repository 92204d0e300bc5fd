"""Hands out the batches of a run in order, so that no gradient becomes too stale; it lives on rank 0.

A batch is one worker's part of a step: with n workers, step t is the batches t*n to t*n + n - 1. An update is made of
the gradients of any n batches, in the order of arrival. So a run has as many updates as synchronous training has steps.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

POLL_SECONDS = 1.0  # between two checks whether another thread has failed


@dataclass(frozen=True, slots=True)
class Batch:
    """The number of a batch, and the version of the weights that its gradient needs at least."""

    number: int
    version: int


@dataclass(frozen=True, slots=True)
class Pause:
    """All workers wait for each other once `step` updates are applied."""

    step: int


class BatchCounter:
    """The shared counter of batches. Its methods may be called by any thread.

    A worker that begins batch b of n workers promises an update of number b // n at the latest. Let v be the oldest
    version of the weights that any worker computes on. Then b may begin once b // n is at most v + staleness: the
    gradients of all batches in progress are applied before update v + staleness + 1. With staleness 0, all batches of a
    step are computed on the same weights, and no batch of the next step begins before they are updated.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        staleness: int,
        check: Callable[[], None] = lambda: None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`check` raises if another thread of this rank has failed, so that nobody waits forever."""
        self._poll_seconds = poll_seconds
        self._num_workers, self._staleness, self._check = num_workers, staleness, check
        self._changed = threading.Condition()
        self._segment = 0  # segments end with a pause
        self._begun = self._finished = self._end = 0  # batches
        self._version = 0
        self._in_progress: dict[int, int] = {}  # by worker: the version at which its batch began

    def open(self, *, start: int, end: int) -> None:
        """Begin a segment, the steps from `start` to `end`. All batches before it are applied."""
        with self._changed:
            assert not self._in_progress, "a segment begins after a pause"
            self._segment += 1
            self._begun = self._finished = start * self._num_workers
            self._end, self._version = end * self._num_workers, start
            self._changed.notify_all()

    def set_version(self, version: int) -> None:
        """Say that so many updates are applied."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def take(self, worker: int, *, segment: int, pause: bool = False) -> Batch | Pause:
        """Return the next batch for a worker as soon as it may begin; a pause at the end of the segment.

        `segment` counts the segments that the worker has seen begin, from 1. With `pause` the segment ends after the
        steps that have begun.
        """
        with self._changed:
            self._wait(lambda: self._segment >= segment)
            assert self._segment == segment, "no worker misses a pause"
            if pause:
                self._end = min(self._end, -(-self._begun // self._num_workers) * self._num_workers)
                self._changed.notify_all()
            self._wait(lambda: self._begun >= self._end or self._may_begin())
            if self._begun >= self._end:
                return Pause(self._end // self._num_workers)
            batch = Batch(self._begun, self._version)
            self._begun += 1
            self._in_progress[worker] = batch.version
            return batch

    def finish(self, worker: int) -> int:
        """Return the number of the update that the gradient of a worker's batch belongs to, in the order of arrival."""
        with self._changed:
            del self._in_progress[worker]
            update = self._finished // self._num_workers
            self._finished += 1
            self._changed.notify_all()
            return update

    def _may_begin(self) -> bool:
        oldest = min([self._version, *self._in_progress.values()])
        return self._begun // self._num_workers <= oldest + self._staleness

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        while not self._changed.wait_for(is_ready, timeout=self._poll_seconds):
            self._check()
