"""The processes that load for a rank: who loads which step, and what happens when one of them dies or hangs."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from trimaran.data.feed import LoadedArrays
from trimaran.data.loader_worker import (
    NO_SAMPLE,
    NUM_SLOTS,
    DeadWorkerError,
    HungWorkerError,
    RaisedInWorkerError,
    Read,
    Worker,
)

log = logging.getLogger(__name__)

RESTARTS = 3  # of a worker process for the same step


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """The work of a step and the seconds it took, or why there is none. `worker`, `pid` and `sample` say who and where.

    The arrays lie in shared memory: copy them before the next step is asked for.
    """

    step: int
    load: LoadedArrays | Exception
    seconds: float
    worker: int
    pid: int | None
    sample: int


class WorkerPool:
    """Worker processes. Whoever has time gets the next step, so that a slow step holds up nobody but itself.

    A process that hangs or dies is replaced by a new one, which gets the steps that were owed; only when that has
    happened several times for one step is it given up. All methods but `kill` are for one thread.
    """

    def __init__(self, read: Read, *, timeout_seconds: float) -> None:
        self._read, self._timeout_seconds = read, timeout_seconds
        self._workers: list[Worker] = []
        self._leaving: list[Worker] = []
        self._failures: Counter[int] = Counter()
        self._seen: dict[int, int] = {}  # the sample at which a step was last seen to fail
        self._killed, self._forking = False, threading.Lock()

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def owed(self) -> int:
        """How many steps were asked for and have not come back."""
        return sum(len(worker.owed) for worker in (*self._workers, *self._leaving))

    def resize(self, size: int) -> None:
        """Start processes, or have the last ones leave as soon as they owe nothing."""
        while len(self._workers) < size and (worker := self._start()) is not None:
            self._workers.append(worker)
        self._leaving += self._workers[size:]
        del self._workers[size:]
        for worker in [each for each in self._leaving if not each.owed]:
            self._leaving.remove(worker)
            self._end(worker)

    def ask(self, step: int) -> bool:
        """Give `step` to the worker that owes least, and return whether any had time."""
        worker = min(self._workers, key=lambda each: len(each.owed), default=None)
        if worker is None or len(worker.owed) >= NUM_SLOTS:
            return False
        worker.ask(step)
        return True

    def collect(self, bell: int) -> list[WorkerAnswer]:
        """Wait until something comes, from a worker or from the file `bell`, and return what came from the workers.

        What is returned has to be copied before the next call of any method.
        """
        workers = [each for each in (*self._workers, *self._leaving) if each.owed]
        # When a process that has not begun is due is not known before it has: look again after its allowance.
        patience = min(self._timeout_seconds, min((each.due for each in workers), default=0.0) - time.monotonic())
        ready = wait([bell, *(each.answers for each in workers)], max(0.0, patience) if workers else None)
        found = [self._receive(each) for each in workers if each.answers in ready]
        now = time.monotonic()
        for worker in workers:
            if worker.answers not in ready and now > worker.due:
                found.append(self._lost(worker, HungWorkerError(f"nothing came for {self._timeout_seconds:g} s")))
        return [answer for answer in found if answer is not None]

    def kill(self) -> None:
        """End all processes now, and start none any more. Any thread may."""
        with self._forking:
            self._killed = True
            for worker in (*self._workers, *self._leaving):
                worker.kill()

    def let_go(self) -> None:
        """End what is left, and give back what the processes needed."""
        self.kill()
        for worker in (*self._workers, *self._leaving):
            worker.let_go()

    def _receive(self, worker: Worker) -> WorkerAnswer | None:
        step = worker.owed[0]
        try:
            load, seconds = worker.receive()
        except (DeadWorkerError, HungWorkerError) as error:
            return self._lost(worker, error)
        except RaisedInWorkerError as error:
            answer = self._answer(worker, error)
            worker.owed.clear()  # it has ended itself, and what it owed comes after the fault
            return answer
        return WorkerAnswer(step, load, seconds, self._number(worker), worker.pid, worker.sample)

    def _lost(self, worker: Worker, error: Exception) -> WorkerAnswer | None:
        """Put another process in the place of a worker. Return an answer only if the step is given up."""
        step = worker.owed[0]
        self._failures[step] += 1
        if worker.sample != NO_SAMPLE:  # a new process may be given up before it comes that far
            self._seen[step] = worker.sample
        given_up = self._answer(worker, error)
        self._end(worker)
        new = None if self._failures[step] > RESTARTS else self._start(but=worker)
        if new is None:
            worker.owed.clear()
            return given_up
        # As text: whoever kept the error would keep its frames, and the shared memory that they look at.
        log.warning("loader worker %d was replaced at step %d: %s", self._number(worker), step + 1, str(error))
        for team in (self._workers, self._leaving):
            team[:] = [new if each is worker else each for each in team]
        for owed in worker.owed:
            new.ask(owed)
        return None

    def _answer(self, worker: Worker, error: Exception) -> WorkerAnswer:
        step = worker.owed[0]
        return WorkerAnswer(step, error, 0.0, self._number(worker), worker.pid, self._seen.get(step, worker.sample))

    def _number(self, worker: Worker) -> int:
        return [*self._workers, *self._leaving].index(worker)

    def _start(self, *, but: Worker | None = None) -> Worker | None:
        """Return a new process, or None when the team has been ended."""
        siblings: Sequence[Worker] = [each for each in (*self._workers, *self._leaving) if each is not but]
        with self._forking:
            return (
                None if self._killed else Worker(self._read, timeout_seconds=self._timeout_seconds, siblings=siblings)
            )

    @staticmethod
    def _end(worker: Worker) -> None:
        worker.kill()
        worker.let_go()
