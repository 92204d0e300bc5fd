"""A process that loads batches for a rank.

`torch.utils.data.DataLoader` has such processes too. Ours differ in what a long run needs: a dead one is noticed at
its own pipe and named, not by a signal handler that raises wherever the trainer happens to be, and it can be replaced
without losing or repeating a batch, as can a hung one; they outlive the SIGTERM that asks a trainer to finish its step;
closing never waits for a hung one; no pickle and no /dev/shm is involved.
"""

import multiprocessing
import os
import signal
import struct
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np

LENGTH = struct.Struct("=I")  # of what went wrong, before that or, where it is 0, before the batch

Fill = Callable[[int, np.ndarray], None]
"""Put the batch of a step into an array."""


class DeadWorkerError(Exception):
    """The process ended without being told to."""


class HungWorkerError(Exception):
    """The process lives and says nothing."""


class RaisedInWorkerError(Exception):
    """The code in the process raised; the message ends with the error, and before it comes its traceback."""


class Worker:
    """One forked process that loads the given steps, one ahead of what was received, into arrays of one shape."""

    def __init__(self, fill: Fill, steps: range, shape: tuple[int, ...], *, siblings: Sequence["Worker"]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe(duplex=False)
        # A fork inherits the reading ends. It has to close them, or no worker would notice that the rank is gone.
        inherited = [self._pipe, *(sibling._pipe for sibling in siblings)]
        self._process = context.Process(target=_run, args=(fill, steps, shape, theirs, inherited), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def receive(self, out: np.ndarray, *, timeout_seconds: float) -> None:
        """Put the next step's batch into `out`. Waits until there is one, the process ends, or it takes too long."""
        try:
            (size,) = LENGTH.unpack(self._read(memoryview(bytearray(LENGTH.size)), timeout_seconds))
            trouble = bytes(self._read(memoryview(bytearray(size)), timeout_seconds))
            if not trouble:
                self._read(out.reshape(-1).data.cast("B"), timeout_seconds)
        except (EOFError, OSError):
            self._process.join(timeout=1.0)
            raise DeadWorkerError(_how(self._process.exitcode)) from None
        if trouble:
            raise RaisedInWorkerError(trouble.decode())

    def _read(self, into: memoryview, timeout_seconds: float) -> memoryview:
        """Fill `into` and return it. A process may stop in the middle of a word, so none is waited for without end."""
        filled = 0
        while filled < len(into):
            if not self._pipe.poll(timeout_seconds):
                raise HungWorkerError(f"nothing came for {timeout_seconds:g} s")
            size = os.readv(self._pipe.fileno(), [into[filled:]])
            if not size:
                raise EOFError
            filled += size
        return into

    def end(self) -> None:
        """End the process now; it holds nothing that could be lost."""
        self._process.kill()
        self._process.join(timeout=1.0)


def _run(fill: Fill, steps: range, shape: tuple[int, ...], pipe: Connection, inherited: Sequence[Connection]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a stop is agreed between the ranks, which need their data until then
    for each in inherited:
        each.close()
    batch = np.empty(shape, dtype=np.int64)
    try:
        for step in steps:
            try:
                fill(step, batch)
            except Exception:
                trouble = traceback.format_exc().encode()
                _write(pipe, LENGTH.pack(len(trouble)) + trouble)
                return
            _write(pipe, LENGTH.pack(0))
            _write(pipe, batch.reshape(-1).data.cast("B"))
    except BrokenPipeError:
        return  # the rank is gone


def _write(pipe: Connection, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(pipe.fileno(), left) :]


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
