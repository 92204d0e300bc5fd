"""A worker process that loads batches for a rank.

Differences from the workers of `torch.utils.data.DataLoader`, which long runs need:

- A dead worker is detected at its own pipe and named, not by a signal handler that raises anywhere in the trainer.
- A dead or hung worker can be replaced without losing or repeating a batch.
- Workers ignore the SIGTERM that asks a trainer to finish its step.
- Closing never waits for a hung worker.
- Batches need neither pickle nor /dev/shm.

The rank requests a step by writing its number to a pipe. The arrays come back in a slot of shared memory; a JSON header
in another pipe says where they are. A worker has two slots and at most two pending steps: it fills one slot while the
rank reads the other.
"""

import gc
import json
import mmap
import multiprocessing
import os
import signal
import struct
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from trimaran.core import UserError
from trimaran.data.feed import BadSample, LoadedArrays
from trimaran.data.shared_slot import SharedSlot
from trimaran.data.worker_pool import (
    NO_SAMPLE,
    NUM_SLOTS,
    START_SECONDS,
    DeadWorkerError,
    HungWorkerError,
    MistakeInWorkerError,
    RaisedInWorkerError,
    Read,
)

PREFIX = struct.Struct("=?I")  # success flag and length of the JSON message that follows
STEP = struct.Struct("=q")


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
        self._results, results = context.Pipe(duplex=False)
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

    @property
    def results(self) -> Connection:
        """The pipe that becomes readable with the next result."""
        return self._results

    def request(self, step: int) -> None:
        """Request `step` after the pending ones."""
        assert len(self.pending) < NUM_SLOTS
        if not self.pending:
            self.last_active = time.monotonic()
        self.pending.append(step)
        with suppress(BrokenPipeError):  # the process is dead; `receive` will notice
            os.write(self._requests.fileno(), STEP.pack(step))

    def receive(self) -> tuple[LoadedArrays, float]:
        """Return the arrays of the oldest pending step and the seconds that loading took.

        Waits until a result arrives, the process ends, or the timeout passes. The arrays are views of shared memory:
        copy them before the next request.
        """
        try:
            ok, size = PREFIX.unpack(self._read(memoryview(bytearray(PREFIX.size))))
            message = json.loads(bytes(self._read(memoryview(bytearray(size)))))
        except (EOFError, OSError):
            self._process.join(timeout=1.0)
            raise DeadWorkerError(_exit_text(self._process.exitcode)) from None
        if not ok and isinstance(message, Mapping):
            raise MistakeInWorkerError(UserError(**message))
        if not ok:
            raise RaisedInWorkerError(message)
        arrays = self._slots[self._received % NUM_SLOTS].arrays(message["arrays"], message["slot_bytes"])
        self.pending.popleft()
        self._received, self.last_active = self._received + 1, time.monotonic()
        return _from_header(message, arrays), message["seconds"]

    def _read(self, into: memoryview) -> memoryview:
        """Fill `into` and return it. A process may hang in the middle of a message, so every read has a timeout."""
        filled = 0
        while filled < len(into):
            if not self._results.poll(self._timeout_seconds):
                raise HungWorkerError(f"no data for {self._timeout_seconds:g} s")
            size = os.readv(self._results.fileno(), [into[filled:]])
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
        for each in (self._results, self._requests, *self._slots):
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
            header = _header_of(loaded) | {"arrays": locations, "slot_bytes": slot.num_bytes}
            header["seconds"] = time.perf_counter() - began
        except UserError as mistake:
            _send(results, {name: getattr(mistake, name) for name in ("code", "what", "where", "fix")}, ok=False)
            return False
        except Exception:
            _send(results, traceback.format_exc(), ok=False)
            return False
        _send(results, header, ok=True)
        return True


def _header_of(loaded: LoadedArrays) -> dict[str, Any]:
    """Return everything but the arrays."""
    bad = [(each.sample, each.reason) for each in loaded.bad]
    return {
        "num_valid": loaded.num_valid,
        "offsets": dict(loaded.offsets),
        "metrics": dict(loaded.metrics),
        "bad": bad,
    }


def _from_header(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> LoadedArrays:
    offsets = {name: tuple(each) for name, each in header["offsets"].items()}
    bad = tuple(BadSample(*each) for each in header["bad"])
    return LoadedArrays(
        arrays=arrays, num_valid=header["num_valid"], offsets=offsets, metrics=header["metrics"], bad=bad
    )


def _send(pipe: Connection, message: Any, *, ok: bool) -> None:
    text = json.dumps(message, default=_to_python).encode()
    left = memoryview(PREFIX.pack(ok, len(text)) + text)
    while left:
        left = left[os.write(pipe.fileno(), left) :]


def _to_python(value: Any) -> Any:
    """Return a numpy scalar as a Python number."""
    return value.item()


def _exit_text(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
