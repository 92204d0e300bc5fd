"""Batches of one rank, loaded while it computes. Which samples they hold is a function of the step alone."""

import atexit
import queue
import threading
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trimaran.data.order import positions
from trimaran.data.sequences import IGNORED, Sequences
from trimaran.data.worker import DeadWorkerError, RaisedInWorkerError, Worker

DEPTH = 2
NAMED_SAMPLES = 8
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
    """Loading failed: which worker (None is the thread), how, at which step and with which samples.

    `step` counts from 0 as batches do; the message counts from 1 as the metrics do.
    """

    def __init__(
        self, what: str, *, worker: int | None, pid: int | None, step: int, sample_ids: tuple[int, ...]
    ) -> None:
        who = "the loading thread" if worker is None else f"loader worker {worker} (pid {pid})"
        some = ", ".join(map(str, sample_ids[:NAMED_SAMPLES]))
        more = f", ... {len(sample_ids)} in all" if len(sample_ids) > NAMED_SAMPLES else ""
        super().__init__(f"{who} {what} at step {step + 1}, samples {some}{more}")
        self.worker, self.pid, self.step, self.sample_ids = worker, pid, step, sample_ids


class Loader:
    """Yields the batches of steps `start_step` to `steps` (exclusive), always loading a few ahead.

    A thread fills the queue. With `workers` it only collects: worker n of W loads every W-th step, in its own process.
    No call waits longer than `timeout_seconds`; a loader silent for that long has hung.
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
    ) -> None:
        assert len(sequences) > 0
        self._sequences, self._seed, self._share = sequences, seed, share
        self._steps, self._timeout_seconds, self._pin_memory = range(start_step, steps), timeout_seconds, pin_memory
        rows = share.grad_accum * share.micro_batch
        self._shape = (3 if sequences.isolate else 2, rows, sequences.seq_len)
        self._workers: list[Worker] = []
        for number in range(workers):
            turns = self._steps[number::workers]
            self._workers.append(Worker(self._fill, turns, self._shape, siblings=self._workers))
        self._next_step, self._closed = start_step, False
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
            item = self._ready.get(timeout=self._timeout_seconds)
        except queue.Empty:
            item = self._fault(f"has hung: nothing came for {self._timeout_seconds:g} s", self._next_step)
        if isinstance(item, LoaderFault):
            self.close()
            raise item
        self._next_step += 1
        return item

    def close(self) -> None:
        """End the processes and the thread. Batches that were loaded ahead are dropped."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.end()
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
        return tuple(positions(self._seed, self._share.indices(step).ravel(), len(self._sequences)).tolist())

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
                self._workers[self._turn(step)].receive(batch.numpy())
            else:
                self._fill(step, batch.numpy())
        except DeadWorkerError as error:
            return self._fault(f"crashed ({error})", step)
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

    def _fill(self, step: int, out: np.ndarray) -> None:
        """Put the step's tokens, labels and documents into `out`. Runs in the workers, so without torch."""
        for row, sample_id in enumerate(self.sample_ids(step)):
            sample = self._sequences[sample_id]
            out[0, row], out[1, row] = sample.tokens, sample.labels
            if sample.documents is not None:
                out[2, row] = sample.documents

    def _raised(self, what: str, step: int, error: Exception) -> LoaderFault:
        fault = self._fault(f"raised {what[:NAMED_CHARACTERS]}", step)
        fault.__cause__ = error
        return fault

    def _fault(self, what: str, step: int) -> LoaderFault:
        worker = self._turn(step) if self._workers else None
        pid = self._workers[worker].pid if worker is not None else None
        return LoaderFault(what, worker=worker, pid=pid, step=step, sample_ids=self.sample_ids(step))

    def _turn(self, step: int) -> int:
        """Return the number of the worker that loads `step`."""
        return (step - self._steps.start) % len(self._workers)
