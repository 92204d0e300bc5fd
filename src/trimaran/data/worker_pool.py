"""The worker processes of a rank, which load batches: assigns steps to them and replaces those that die or hang.

Differences from the workers of `torch.utils.data.DataLoader`, which long runs need:

- A dead worker is detected at its own pipe and named, not by a signal handler that raises anywhere in the trainer.
- A dead or hung worker can be replaced without losing or repeating a batch.
- Workers ignore the SIGTERM that asks a trainer to finish its step.
- Closing never waits for a hung worker.
- Batches need neither pickle nor /dev/shm.

The rank requests a step by writing its number to a pipe. The arrays come back in a slot of shared memory; a JSON header
in another pipe says where they are. A worker has two slots and at most two pending steps: it fills one slot while the
rank reads the other. A slot is an anonymous memfd, not a file in /dev/shm: no other process can open it, the kernel
frees it with its last user, and the /dev/shm limit of containers (often 64 MB) does not apply.
"""

import gc
import json
import logging
import mmap
import multiprocessing
import os
import select
import signal
import struct
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from trimaran.core import UserError
from trimaran.data.feed import BadSample, LoadedArrays

ALIGNMENT = 64
GROWTH = 1.25

ArrayLocation = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape and offset of an array
PREFIX = struct.Struct("=?I")  # success flag and length of the JSON message that follows
STEP = struct.Struct("=q")
log = logging.getLogger(__name__)
MAX_RESTARTS = 3  # of a worker process for the same step
NUM_SLOTS = 2  # of a worker, in shared memory, and the most steps that it has pending
NO_SAMPLE = -1
START_SECONDS = 5.0  # extra time for a new process before it loads anything
Read = Callable[[int, Callable[[int], None]], LoadedArrays]
"""Returns the arrays of a step. Calls its second argument with each sample id before reading the sample."""


class SharedSlot:
    """Memory for the arrays of one batch. One process fills it and the other reads it; they synchronize elsewhere."""

    def __init__(self) -> None:
        self._file = os.memfd_create("trimaran-loader")
        self._map: mmap.mmap | None = None
        self.num_bytes = 0

    def fill(self, arrays: Mapping[str, np.ndarray]) -> list[ArrayLocation]:
        """Copy the arrays into the slot and return where they are. The slot grows if needed."""
        locations, end = [], 0
        for name, array in arrays.items():
            locations.append((name, array.dtype.str, array.shape, end))
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if end > self.num_bytes:
            wanted = int(end * GROWTH)
            # Raises if memory is short; touching unallocated pages would kill the process instead.
            os.posix_fallocate(self._file, 0, wanted)
            self._map, self.num_bytes = mmap.mmap(self._file, wanted), wanted
        for (_, _, _, offset), array in zip(locations, arrays.values(), strict=True):
            np.copyto(self._view(array.dtype.str, array.shape, offset), array)
        return locations

    def arrays(self, locations: Sequence[Sequence], num_bytes: int) -> dict[str, np.ndarray]:
        """Return views of the arrays at `locations`. `num_bytes` is the current size of the slot."""
        if num_bytes != self.num_bytes:
            self._map, self.num_bytes = mmap.mmap(self._file, num_bytes), num_bytes
        return {name: self._view(dtype, tuple(shape), offset) for name, dtype, shape, offset in locations}

    def _view(self, dtype: str, shape: tuple[int, ...], offset: int) -> np.ndarray:
        if 0 in shape:
            return np.empty(shape, dtype=dtype)  # a view needs at least one byte
        assert self._map is not None
        return np.ndarray(shape, dtype=dtype, buffer=self._map, offset=offset)

    def close(self) -> None:
        """Release the memory. It is freed once no array refers to it."""
        self._map, self.num_bytes = None, 0
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class LoaderWorker:
    """One forked process that loads the requested steps in order.

    `pending` are the requested steps that have not come back. `last_active` is the time of the last result, or of the
    first request since the worker was idle.
    """

    def __init__(self, read: Read, *, timeout_seconds: float, siblings: Sequence["LoaderWorker"]) -> None:
        self._timeout_seconds = timeout_seconds
        context = multiprocessing.get_context("fork")
        self.pending: deque[int] = deque()
        self.last_active = time.monotonic()
        self._received = 0
        self._slots = tuple(SharedSlot() for _ in range(NUM_SLOTS))
        # The current sample, and the start time of the process (monotonic clock, nanoseconds). This memory outlives the
        # process, so the rank can attribute a crash to a sample.
        self._at = np.frombuffer(mmap.mmap(-1, 2 * STEP.size), dtype=np.int64)
        self._at[0] = NO_SAMPLE
        self.results, results = context.Pipe(duplex=False)  # readable with the next result
        requests, self._requests = context.Pipe(duplex=False)
        arguments = (read, requests, results, [self, *siblings])
        self._process = context.Process(target=self._run, args=arguments, daemon=True)
        self._process.start()
        for child_end in (requests, results):
            child_end.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def sample(self) -> int:
        """The id of the sample that the process is loading, or was loading when it ended."""
        return int(self._at[0])

    @property
    def deadline(self) -> float:
        """When the worker counts as hung. The timeout starts once the process runs: a busy machine starts it late."""
        began = self._at[1] / 1e9 or self.last_active + START_SECONDS
        return max(self.last_active, began) + self._timeout_seconds

    def request(self, step: int) -> None:
        """Request `step` after the pending ones."""
        assert len(self.pending) < NUM_SLOTS
        if not self.pending:
            self.last_active = time.monotonic()
        self.pending.append(step)
        with suppress(BrokenPipeError):  # the process is dead; `receive` will notice
            os.write(self._requests.fileno(), STEP.pack(step))

    def receive(self) -> tuple[LoadedArrays, float]:
        """Wait for the oldest pending step. Return its arrays, to copy before the next request, and load seconds."""
        try:
            ok, size = PREFIX.unpack(self._read(memoryview(bytearray(PREFIX.size))))
            message = json.loads(bytes(self._read(memoryview(bytearray(size)))))
        except (EOFError, OSError):
            self._process.join(timeout=1.0)
            code = self._process.exitcode
            if code is not None and code < 0:
                raise DeadWorkerError(f"killed by {signal.Signals(-code).name}") from None
            raise DeadWorkerError(f"exit code {code}") from None
        if not ok and isinstance(message, Mapping):
            raise UserError(**message)  # of the code in the process
        if not ok:
            raise RaisedInWorkerError(message)
        arrays = self._slots[self._received % NUM_SLOTS].arrays(message["arrays"], message["slot_bytes"])
        self.pending.popleft()
        self._received, self.last_active = self._received + 1, time.monotonic()
        loaded = LoadedArrays(
            arrays=arrays,
            num_valid=message["num_valid"],
            offsets={name: tuple(each) for name, each in message["offsets"].items()},
            metrics=message["metrics"],
            bad=tuple(BadSample(*each) for each in message["bad"]),
        )
        return loaded, message["seconds"]

    def _read(self, into: memoryview) -> memoryview:
        """Fill `into` and return it. A process may hang in the middle of a message, so every read has a timeout."""
        filled = 0
        while filled < len(into):
            if not self.results.poll(self._timeout_seconds):
                raise HungWorkerError(f"no data for {self._timeout_seconds:g} s")
            size = os.readv(self.results.fileno(), [into[filled:]])
            if not size:
                raise EOFError
            filled += size
        return into

    def kill(self) -> None:
        """Kill the process; it has no state to lose. Callable from any thread."""
        self._process.kill()
        self._process.join(timeout=1.0)

    def close(self) -> None:
        """Close the pipes and free the memory. Only for the thread that requests and receives."""
        for each in (self.results, self._requests, *self._slots):
            each.close()

    def _run(self, read: Read, requests: Connection, results: Connection, inherited: Sequence["LoaderWorker"]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # ranks agree on when to stop and need data until then
        self._at[1] = time.monotonic_ns()
        gc.freeze()  # keeps inherited objects out of collections, so their pages stay shared with the rank
        slots, self._slots = self._slots, ()
        # A fork inherits the rank's ends of all pipes and the slots of the other workers. Close them: otherwise no
        # worker would notice that the rank is gone, and the slots would outlive their owners.
        for each in inherited:
            each.close()
        with suppress(BrokenPipeError):  # the rank is gone
            number = 0
            while word := os.read(requests.fileno(), STEP.size):
                if not self._serve(read, STEP.unpack(word)[0], slots[number % NUM_SLOTS], results):
                    return
                number += 1

    def _serve(self, read: Read, step: int, slot: SharedSlot, results: Connection) -> bool:
        """Load `step` into the slot and send the header. Return False if loading raised."""
        try:
            began = time.perf_counter()
            loaded = read(step, lambda sample: self._at.__setitem__(0, sample))
            self._at[0] = NO_SAMPLE
            locations = slot.fill(loaded.arrays)
            header = {
                "num_valid": loaded.num_valid,
                "offsets": dict(loaded.offsets),
                "metrics": dict(loaded.metrics),
                "bad": [(each.sample, each.reason) for each in loaded.bad],
                "arrays": locations,
                "slot_bytes": slot.num_bytes,
                "seconds": time.perf_counter() - began,
            }
        except UserError as mistake:
            _send(results, {name: getattr(mistake, name) for name in ("code", "what", "where", "fix")}, ok=False)
            return False
        except Exception:
            _send(results, traceback.format_exc(), ok=False)
            return False
        _send(results, header, ok=True)
        return True


def _send(pipe: Connection, message: Any, *, ok: bool) -> None:
    text = json.dumps(message, default=lambda scalar: scalar.item()).encode()  # of numpy
    left = memoryview(PREFIX.pack(ok, len(text)) + text)
    while left:
        left = left[os.write(pipe.fileno(), left) :]


class DeadWorkerError(Exception):
    """The process ended unexpectedly."""


class HungWorkerError(Exception):
    """The process is alive and sends nothing."""


class RaisedInWorkerError(Exception):
    """The code in the process raised. The message is the traceback; its last line is the error."""


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
            worker.kill()
            worker.close()

    def request(self, step: int) -> bool:
        """Give `step` to the worker with the fewest pending steps. Return False if all are busy."""
        worker = min(self._workers, key=lambda each: len(each.pending), default=None)
        if worker is None or len(worker.pending) >= NUM_SLOTS:
            return False
        worker.request(step)
        return True

    def collect(self, wakeup: int) -> list[WorkerResult]:
        """Wait for a result or the descriptor `wakeup`; return the results. Copy their arrays before the next call."""
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

    def _receive(self, worker: LoaderWorker) -> WorkerResult | None:
        step = worker.pending[0]
        try:
            loaded, seconds = worker.receive()
        except (DeadWorkerError, HungWorkerError) as error:
            return self._replace(worker, error)
        except (RaisedInWorkerError, UserError) as error:
            failure = self._failure(worker, error)
            worker.pending.clear()  # the process has ended, and its other steps come after the failed one
            return failure
        return WorkerResult(step, loaded, seconds, self._number(worker), worker.pid, worker.sample)

    def _replace(self, worker: LoaderWorker, error: Exception) -> WorkerResult | None:
        """Replace a worker by a new process. Return a failure only if the step is given up."""
        step = worker.pending[0]
        self._failures[step] += 1
        if worker.sample != NO_SAMPLE:  # a replacement may fail before it reaches a sample
            self._failed_sample[step] = worker.sample
        failure = self._failure(worker, error)
        worker.kill()
        worker.close()
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

    def _failure(self, worker: LoaderWorker, error: Exception) -> WorkerResult:
        step = worker.pending[0]
        sample = self._failed_sample.get(step, worker.sample)
        return WorkerResult(step, error, 0.0, self._number(worker), worker.pid, sample)

    def _number(self, worker: LoaderWorker) -> int:
        return [*self._workers, *self._draining].index(worker)

    def _start(self, *, replaces: LoaderWorker | None = None) -> LoaderWorker | None:
        """Return a new worker; None if the pool was killed."""
        siblings: Sequence[LoaderWorker] = [each for each in (*self._workers, *self._draining) if each is not replaces]
        with self._forking:
            if self._killed:
                return None
            return LoaderWorker(self._read, timeout_seconds=self._timeout_seconds, siblings=siblings)
