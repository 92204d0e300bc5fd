"""A process that loads batches for a rank.

`torch.utils.data.DataLoader` has such processes too. Ours differ in what a long run needs: a dead one is noticed at
its own pipe and named, not by a signal handler that raises wherever the trainer happens to be; they outlive the SIGTERM
that asks a trainer to finish its step; closing never waits for a hung one; no pickle and no /dev/shm is involved.
"""

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np

Fill = Callable[[int, np.ndarray], None]
"""Put the batch of a step into an array."""


class DeadWorkerError(Exception):
    """The process ended without being told to."""


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

    def receive(self, out: np.ndarray) -> None:
        """Put the next step's batch into `out`. Waits until there is one, or until the process ends."""
        try:
            trouble = self._pipe.recv_bytes()
            if not trouble:
                self._pipe.recv_bytes_into(out.reshape(-1).data)
        except (EOFError, OSError):
            self._process.join(timeout=1.0)
            raise DeadWorkerError(_how(self._process.exitcode)) from None
        if trouble:
            raise RaisedInWorkerError(trouble.decode())

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
                pipe.send_bytes(traceback.format_exc().encode())
                return
            pipe.send_bytes(b"")
            pipe.send_bytes(batch.data)
    except BrokenPipeError:
        return  # the rank is gone


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
