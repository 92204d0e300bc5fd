"""Batches of one rank, loaded while it computes. Which samples they hold is a function of the step alone."""

import atexit
import logging
import mmap
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trimaran.data.order import positions
from trimaran.data.quarantine import Screen
from trimaran.data.sequences import IGNORED, Sequences
from trimaran.data.worker import DeadWorkerError, HungWorkerError, RaisedInWorkerError, Worker

log = logging.getLogger(__name__)

DEPTH = 2
RESTARTS = 3  # of a worker process for the same step
START_SECONDS = 5.0  # that a new process may need before it loads anything
NO_SAMPLE = -1
NAMED_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Which part of each global batch is this rank's. `rank` counts among the `dp` ranks that see different samples."""

    rank: int
    dp: int
    micro_batch: int
    grad_accum: int

    def indices(self, step: int) -> np.ndarray:
        """Return the global indices of the step's rows [grad_accum, micro_batch]."""
        rows = np.arange(self.micro_batch) + self.rank * self.micro_batch
        micro_steps = np.arange(self.grad_accum)[:, None] * (self.dp * self.micro_batch)
        return step * (self.dp * self.micro_batch * self.grad_accum) + micro_steps + rows


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step's work for one rank. Tensors are [grad_accum, micro_batch, seq_len].

    `labels` are -100 where there is no target; `num_valid` counts the others. `sample_ids` follow the rows.
    """

    step: int
    tokens: Tensor
    labels: Tensor
    documents: Tensor | None
    num_valid: int
    sample_ids: tuple[int, ...]

    def to(self, device: torch.device) -> "StepBatch":
        """Return the batch on `device`; from pinned memory the copy runs while the host goes on."""
        documents = None if self.documents is None else self.documents.to(device, non_blocking=True)
        tokens, labels = (each.to(device, non_blocking=True) for each in (self.tokens, self.labels))
        return replace(self, tokens=tokens, labels=labels, documents=documents)


class LoaderFault(Exception):  # noqa: N818 - the design's word for what went wrong and is nobody's mistake
    """Loading failed: which worker (None is the thread), how, at which step, and at which sample if at one.

    `step` counts from 0 as batches do; its message from 1 as the metrics do. `sample_ids` has one sample or none.
    """

    def __init__(
        self, what: str, *, worker: int | None, pid: int | None, step: int, sample_ids: tuple[int, ...]
    ) -> None:
        who = "the loading thread" if worker is None else f"loader worker {worker} (pid {pid})"
        at = "".join(f", sample {each}" for each in sample_ids)
        super().__init__(f"{who} {what} at step {step + 1}{at}")
        self.worker, self.pid, self.step, self.sample_ids = worker, pid, step, sample_ids


class Loader:
    """Yields the batches of steps `start_step` to `steps` (exclusive), always loading a few ahead.

    A thread fills the queue. With `workers` it only collects: worker n of W loads every W-th step, in its own process.
    A loader that is silent for `timeout_seconds` has hung. A process that hangs or dies is replaced by a new one, which
    begins with the step that is owed; only when that has happened several times for one step is it a fault.
    """

    def __init__(  # noqa: PLR0913 - what to load and how to load it; splitting them would only move the names
        self,
        sequences: Sequences,
        *,
        seed: int,
        share: Share,
        start_step: int = 0,
        steps: int,
        workers: int = 0,
        timeout_seconds: float = 60.0,
        pin_memory: bool = False,
        screen: Screen | None = None,
    ) -> None:
        assert len(sequences) > 0
        self._sequences, self._seed, self._share, self._screen = sequences, seed, share, screen or Screen()
        self._steps, self._timeout_seconds, self._pin_memory = range(start_step, steps), timeout_seconds, pin_memory
        rows = share.grad_accum * share.micro_batch
        self._shape = (3 if sequences.isolate else 2, rows, sequences.seq_len)
        # The sample that each worker is at. It is memory that outlives the process, to tell what it died of.
        self._num_turns = max(1, workers)
        self._at = np.frombuffer(mmap.mmap(-1, 8 * self._num_turns), dtype=np.int64)
        self._at[:] = NO_SAMPLE
        self._workers: list[Worker] = []
        for number in range(workers):
            turns = self._steps[number::workers]
            self._workers.append(Worker(self._fill, turns, self._shape, siblings=self._workers))
        self._next_step, self._closed, self._closing = start_step, False, threading.Lock()
        self._patience = (timeout_seconds + START_SECONDS) * (1 + RESTARTS) if workers else timeout_seconds
        self._device = torch.accelerator.current_device_index() if pin_memory else None
        self._ready: queue.Queue[StepBatch | LoaderFault] = queue.Queue(maxsize=DEPTH)
        self._thread = threading.Thread(target=self._feed, name="trimaran-loader", daemon=True)
        self._thread.start()
        # multiprocessing's own exit handler asks workers with SIGTERM, which they ignore, and then waits for ever.
        atexit.register(self.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepBatch:
        if self._next_step >= self._steps.stop:
            self.close()
            raise StopIteration
        if self._closed:
            raise ValueError("the loader is closed")
        try:
            item = self._ready.get(timeout=self._patience)
        except queue.Empty:
            item = self._fault(f"has hung: nothing came for {self._patience:g} s", self._next_step)
        if isinstance(item, LoaderFault):
            self.close()
            raise item
        self._next_step += 1
        return item

    def close(self) -> None:
        """End the processes and the thread. Batches that were loaded ahead are dropped."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            for worker in self._workers:
                worker.end()
        atexit.unregister(self.close)
        while not self._ready.empty():
            self._ready.get_nowait()  # the thread may be waiting for room
        self._thread.join(timeout=1.0)  # unless it hangs in a read; then it ends with the process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def sample_ids(self, step: int) -> tuple[int, ...]:
        """Return which samples this rank works on at `step`, in the order of the rows."""
        return self.samples(step, [self._share.rank])

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        """Return which samples the given ranks, of those that see different ones, work on at `step`."""
        shares = [replace(self._share, rank=rank) for rank in data_ranks]
        indices = np.concatenate([share.indices(step).ravel() for share in shares])
        found = self._sequences.first + positions(self._seed, indices, len(self._sequences))
        return tuple(found.tolist())

    def num_quarantined(self, step: int) -> int:
        """Return how many rows of the global batch are left out at `step`."""
        left_out = self._screen.quarantined
        return len(left_out.intersection(self.samples(step, range(self._share.dp)))) if left_out else 0

    def _feed(self) -> None:
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)  # a thread starts on device 0, whichever the rank's is
        for step in self._steps:
            item = self._load(step)
            self._ready.put(item)
            if self._closed or isinstance(item, LoaderFault):
                return

    def _load(self, step: int) -> StepBatch | LoaderFault:
        try:
            batch = torch.empty(self._shape, dtype=torch.int64, pin_memory=self._pin_memory)
            if self._workers:
                self._receive(step, batch.numpy())
            else:
                self._fill(step, batch.numpy())
        except DeadWorkerError as error:
            return self._fault(f"crashed ({error})", step)
        except HungWorkerError as error:
            return self._fault(f"has hung: {error}", step)
        except RaisedInWorkerError as error:
            return self._raised(str(error).rstrip().splitlines()[-1], step, error)
        except Exception as error:
            return self._raised(f"{type(error).__name__}: {error}", step, error)
        tokens, labels, *rest = batch.unflatten(1, (self._share.grad_accum, self._share.micro_batch))
        documents = rest[0].to(torch.int32) if rest else None
        if documents is not None and self._pin_memory:
            documents = documents.pin_memory()
        num_valid = int(np.count_nonzero(labels.numpy() != IGNORED))
        return StepBatch(step, tokens, labels, documents, num_valid, self.sample_ids(step))

    def _receive(self, step: int, out: np.ndarray) -> None:
        """Take the step's batch from the worker whose turn it is, or from those that come in its place."""
        turn = self._turn(step)
        for _ in range(RESTARTS):
            try:
                return self._workers[turn].receive(out, timeout_seconds=self._timeout_seconds)
            except (DeadWorkerError, HungWorkerError) as error:
                if not self._replace(turn, step):
                    raise
                log.warning("loader worker %d was replaced at step %d: %s", turn, step + 1, error)
        return self._workers[turn].receive(out, timeout_seconds=self._timeout_seconds)

    def _replace(self, turn: int, step: int) -> bool:
        """Put a new process, which begins with `step`, in the place of a worker, unless the loader is closed."""
        with self._closing:
            if self._closed:
                return False
            self._workers[turn].end()
            self._at[turn] = NO_SAMPLE
            turns = self._steps[step - self._steps.start :: self._num_turns]
            siblings = [worker for number, worker in enumerate(self._workers) if number != turn]
            self._workers[turn] = Worker(self._fill, turns, self._shape, siblings=siblings)
        return True

    def _fill(self, step: int, out: np.ndarray) -> None:
        """Put the step's tokens, labels and documents into `out`. Runs in the workers, so without torch."""
        turn = self._turn(step)
        for row, sample_id in enumerate(self.sample_ids(step)):
            self._at[turn] = sample_id
            sample = self._screen.load(self._sequences, sample_id - self._sequences.first)
            out[0, row], out[1, row] = sample.tokens, sample.labels
            if sample.documents is not None:
                out[2, row] = sample.documents
        self._at[turn] = NO_SAMPLE

    def _raised(self, what: str, step: int, error: Exception) -> LoaderFault:
        fault = self._fault(f"raised {what[:NAMED_CHARACTERS]}", step)
        fault.__cause__ = error
        return fault

    def _fault(self, what: str, step: int) -> LoaderFault:
        turn = self._turn(step)
        worker, pid = (turn, self._workers[turn].pid) if self._workers else (None, None)
        at = int(self._at[turn])
        sample_ids = (at,) if at in self.sample_ids(step) else ()  # it may be ahead of what is owed
        return LoaderFault(what, worker=worker, pid=pid, step=step, sample_ids=sample_ids)

    def _turn(self, step: int) -> int:
        """Return the number of the worker that loads `step`; 0 without any."""
        return (step - self._steps.start) % self._num_turns
