"""The worker processes of a rank: assigns steps to them and replaces those that die or hang."""

import logging
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from trimaran.core import UserError
from trimaran.data.feed import LoadedArrays

if TYPE_CHECKING:
    from trimaran.data.loader_worker import LoaderWorker

log = logging.getLogger(__name__)

MAX_RESTARTS = 3  # of a worker process for the same step
NUM_SLOTS = 2  # of a worker, in shared memory, and the most steps that it has pending
NO_SAMPLE = -1
START_SECONDS = 5.0  # extra time for a new process before it loads anything

Read = Callable[[int, Callable[[int], None]], LoadedArrays]
"""Returns the arrays of a step. Calls its second argument with each sample id before reading the sample."""


class DeadWorkerError(Exception):
    """The process ended unexpectedly."""


class HungWorkerError(Exception):
    """The process is alive and sends nothing."""


class RaisedInWorkerError(Exception):
    """The code in the process raised. The message is the traceback; its last line is the error."""


class MistakeInWorkerError(RaisedInWorkerError):
    """The code in the process raised a UserError, which is `mistake`."""

    def __init__(self, mistake: UserError) -> None:
        super().__init__(str(mistake))
        self.mistake = mistake


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """The arrays of a step, or the error that prevented it. `worker`, `pid` and `sample` say where it came from.

    The arrays are views of shared memory: copy them before the next request.
    """

    step: int
    loaded: LoadedArrays | Exception
    seconds: float
    worker: int
    pid: int | None
    sample: int


class WorkerPool:
    """Worker processes. The next step goes to a worker with free capacity, so a slow step delays no other.

    A worker that hangs or dies is replaced, and the new one gets its pending steps. A step that fails more than
    MAX_RESTARTS times is given up. Only `kill` may be called from other threads.
    """

    def __init__(self, read: Read, *, timeout_seconds: float) -> None:
        self._read, self._timeout_seconds = read, timeout_seconds
        self._workers: list[LoaderWorker] = []
        self._draining: list[LoaderWorker] = []  # end once they have nothing pending
        self._failures: Counter[int] = Counter()
        self._failed_sample: dict[int, int] = {}  # by step: the sample at which it last failed
        self._killed, self._forking = False, threading.Lock()

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def num_pending(self) -> int:
        """How many steps were requested and have not come back."""
        return sum(len(worker.pending) for worker in (*self._workers, *self._draining))

    def resize(self, size: int) -> None:
        """Start workers, or let the last ones end as soon as they have nothing pending."""
        while len(self._workers) < size and (worker := self._start()) is not None:
            self._workers.append(worker)
        self._draining += self._workers[size:]
        del self._workers[size:]
        for worker in [each for each in self._draining if not each.pending]:
            self._draining.remove(worker)
            self._end(worker)

    def request(self, step: int) -> bool:
        """Give `step` to the worker with the fewest pending steps. Return False if all are busy."""
        worker = min(self._workers, key=lambda each: len(each.pending), default=None)
        if worker is None or len(worker.pending) >= NUM_SLOTS:
            return False
        worker.request(step)
        return True

    def collect(self, wakeup: int) -> list[WorkerResult]:
        """Wait for a result or for the file descriptor `wakeup`, and return the results.

        Copy the arrays before the next call of any method.
        """
        workers = [each for each in (*self._workers, *self._draining) if each.pending]
        if not workers:
            poll = select.poll()
            poll.register(wakeup, select.POLLIN)
            poll.poll()
            return []
        # The deadline of a process that has not started yet is unknown: check again after one timeout.
        patience = min(self._timeout_seconds, min(each.deadline for each in workers) - time.monotonic())
        ready = wait([wakeup, *(each.results for each in workers)], max(0.0, patience))
        results = [self._receive(each) for each in workers if each.results in ready]
        now = time.monotonic()
        for worker in workers:
            if worker.results not in ready and now > worker.deadline:
                results.append(self._replace(worker, HungWorkerError(f"no data for {self._timeout_seconds:g} s")))
        return [each for each in results if each is not None]

    def kill(self) -> None:
        """Kill all processes and start no more. Callable from any thread."""
        with self._forking:
            self._killed = True
            for worker in (*self._workers, *self._draining):
                worker.kill()

    def close(self) -> None:
        """Kill the remaining processes and free their pipes and memory."""
        self.kill()
        for worker in (*self._workers, *self._draining):
            worker.close()

    def _receive(self, worker: "LoaderWorker") -> WorkerResult | None:
        step = worker.pending[0]
        try:
            loaded, seconds = worker.receive()
        except (DeadWorkerError, HungWorkerError) as error:
            return self._replace(worker, error)
        except RaisedInWorkerError as error:
            failure = self._failure(worker, error)
            worker.pending.clear()  # the process has ended, and its other steps come after the failed one
            return failure
        return WorkerResult(step, loaded, seconds, self._number(worker), worker.pid, worker.sample)

    def _replace(self, worker: "LoaderWorker", error: Exception) -> WorkerResult | None:
        """Replace a worker by a new process. Return a failure only if the step is given up."""
        step = worker.pending[0]
        self._failures[step] += 1
        if worker.sample != NO_SAMPLE:  # a replacement may fail before it reaches a sample
            self._failed_sample[step] = worker.sample
        failure = self._failure(worker, error)
        self._end(worker)
        new = None if self._failures[step] > MAX_RESTARTS else self._start(replaces=worker)
        if new is None:
            worker.pending.clear()
            return failure
        # Log the text only: a reference to the error would keep its frames and their shared memory alive.
        log.warning("loader worker %d was replaced at step %d: %s", self._number(worker), step + 1, str(error))
        for workers in (self._workers, self._draining):
            workers[:] = [new if each is worker else each for each in workers]
        for pending in worker.pending:
            new.request(pending)
        return None

    def _failure(self, worker: "LoaderWorker", error: Exception) -> WorkerResult:
        step = worker.pending[0]
        sample = self._failed_sample.get(step, worker.sample)
        return WorkerResult(step, error, 0.0, self._number(worker), worker.pid, sample)

    def _number(self, worker: "LoaderWorker") -> int:
        return [*self._workers, *self._draining].index(worker)

    def _start(self, *, replaces: "LoaderWorker | None" = None) -> "LoaderWorker | None":
        """Return a new worker; None if the pool was killed."""
        from trimaran.data.loader_worker import LoaderWorker  # noqa: PLC0415  many ranks load in a thread

        siblings: Sequence[LoaderWorker] = [each for each in (*self._workers, *self._draining) if each is not replaces]
        with self._forking:
            if self._killed:
                return None
            return LoaderWorker(self._read, timeout_seconds=self._timeout_seconds, siblings=siblings)

    @staticmethod
    def _end(worker: "LoaderWorker") -> None:
        worker.kill()
        worker.close()
