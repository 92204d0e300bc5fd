"""Loads the batches of one rank in the background. The samples of a batch depend only on the step."""

import atexit
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import psutil
import torch
from torch import Tensor

from trimaran.core import UserError
from trimaran.data.feed import BatchFeed, LoadedArrays
from trimaran.data.loader_tuner import (
    EXTRA_BATCHES_AHEAD,
    LoaderChange,
    LoaderLimits,
    LoaderSetting,
    LoaderTuner,
    LoaderWaits,
)
from trimaran.data.step_batch import StepBatch
from trimaran.data.worker_pool import (
    MAX_RESTARTS,
    NO_SAMPLE,
    START_SECONDS,
    DeadWorkerError,
    HungWorkerError,
    RaisedInWorkerError,
    WorkerPool,
    WorkerResult,
)

log = logging.getLogger(__name__)

MAX_ERROR_CHARACTERS = 300


class LoaderFault(Exception):  # noqa: N818 - a fault is a failure that is not the user's mistake
    """Loading failed: in which worker (None: the thread), at which step and, if known, at which sample.

    `step` counts from 0, like batches; the message counts from 1, like the metrics. `sample_ids` has at most one id.
    """

    def __init__(
        self, what: str, *, worker: int | None, pid: int | None, step: int, sample_ids: tuple[int, ...]
    ) -> None:
        who = "the loading thread" if worker is None else f"loader worker {worker} (pid {pid})"
        at = "".join(f", sample {each}" for each in sample_ids)
        super().__init__(f"{who} {what} at step {step + 1}{at}")
        self.worker, self.pid, self.step, self.sample_ids = worker, pid, step, sample_ids


Item = StepBatch | LoaderFault | UserError


class Loader:
    """Yields the batches of steps `start_step` to `steps` (exclusive), and loads a few batches ahead.

    A thread loads them, or collects the batches of `workers` processes. `auto` starts with the thread and changes the
    number of processes during the run, from the trainer's waits and within `limits` (see `loader_tuner`). A fixed
    number does not change. A loader that sends nothing for `timeout_seconds` has hung. A process that hangs or dies is
    replaced.
    """

    def __init__(
        self,
        feed: BatchFeed,
        *,
        start_step: int = 0,
        steps: int,
        workers: int | Literal["auto"] = 0,
        timeout_seconds: float = 60.0,
        limits: LoaderLimits | None = None,
    ) -> None:
        self._feed, self._steps, self._timeout_seconds = feed, range(start_step, steps), timeout_seconds
        self._limits = limits or LoaderLimits(  # half of what is free, if nobody says what this rank may use
            cores=len(os.sched_getaffinity(0)) // 2, free_bytes=psutil.virtual_memory().available // 2
        )
        number = 0 if workers == "auto" else workers
        setting = LoaderSetting(workers=number, depth=number + EXTRA_BATCHES_AHEAD, pin=self._limits.pin_memory)
        self._tuner = LoaderTuner(self._limits, setting, fixed=workers != "auto")
        self.changes: list[LoaderChange] = []
        self._waits = LoaderWaits()
        self._pool = WorkerPool(feed.load, timeout_seconds=timeout_seconds)
        self._at = NO_SAMPLE  # the sample that the thread is loading
        # The step of the next batch, the next one to load, and the one after the last.
        self.next_step, self._next_request, self._last = start_step, start_step, steps
        self._ready: dict[int, Item] = {}
        self._changed = threading.Condition()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # wakes the loading thread
        self._closed, self._closing = False, threading.Lock()
        self._device = torch.accelerator.current_device_index() if self._limits.pin_memory else None
        self._pool.resize(number)  # fork before starting more threads
        self._thread = threading.Thread(target=self._load_ahead, name="trimaran-loader", daemon=True)
        self._thread.start()
        # multiprocessing's exit handler sends SIGTERM, which the workers ignore, and then waits forever.
        atexit.register(self.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepBatch:
        if self.next_step >= self._steps.stop:
            self.close()
            raise StopIteration
        if self._closed:
            raise ValueError("the loader is closed")
        began = time.monotonic()
        # The timeout allows for all restarts of a worker process.
        patience = (self._timeout_seconds + START_SECONDS) * (1 + MAX_RESTARTS) if self._pool else self._timeout_seconds
        with self._changed:
            if self._changed.wait_for(lambda: self.next_step in self._ready, timeout=patience):
                item = self._ready.pop(self.next_step)
            else:
                item = self._fault(f"has hung: no data for {patience:g} s", self.next_step, sample=self._at)
        if not isinstance(item, StepBatch):
            self.close()
            raise item
        self.next_step += 1
        self._waits.record_wait(began)
        # At the end of a window the tuner may change the setting; the loading thread picks it up.
        if (window := self._waits.window()) and (chosen := self._tuner.choose(window)):
            setting, reason = chosen
            self.changes.append(LoaderChange(self.next_step, setting, reason))
            self._waits.skip(setting.depth)
            log.info("%d loader processes, %d batches ahead: %s", setting.workers, setting.depth, reason)
        os.eventfd_write(self._wakeup, 1)  # one more batch may be requested
        return item

    def stats(self) -> dict[str, Any]:
        """Return the current setting, the total wait for batches and the wait for the last one."""
        now = self._tuner.setting
        return {"workers": now.workers, "depth": now.depth, "pinned": now.pin, **self._waits.stats()}

    def close(self) -> None:
        """End the processes and the thread. Drops batches that were loaded ahead."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._pool.kill()
        atexit.unregister(self.close)
        os.eventfd_write(self._wakeup, 1)  # the thread may be waiting
        self._thread.join(timeout=1.0)  # a thread that hangs in a read ends with the process
        if not self._thread.is_alive():
            os.close(self._wakeup)
        self._ready.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def sample_ids(self, step: int) -> tuple[int, ...]:
        """Return the samples of this rank at `step`, in row order."""
        return self.samples(step, [self._feed.share.rank])

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the samples of the given data ranks at `step`."""
        return self._feed.samples(step, data_ranks)

    def num_quarantined(self, step: int) -> int:
        """Return how many samples of the global batch are quarantined at `step`."""
        return self._feed.num_quarantined(step)

    def _load_ahead(self) -> None:
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)  # a new thread starts on device 0
        while not self._closed and self.next_step < self._last:
            self._pool.resize(self._tuner.setting.workers)
            if not (len(self._pool) or self._pool.num_pending) and self._may_request:
                self._put(self._next_request, self._read(self._next_request))
                self._next_request += 1
                continue
            while self._may_request and self._pool.request(self._next_request):
                self._next_request += 1
            for result in self._pool.collect(self._wakeup):
                self._put(result.step, self._item(result))
            result = None  # the next fork must not inherit the memory of its arrays
            with suppress(BlockingIOError):  # no wakeup was pending
                os.eventfd_read(self._wakeup)
        self._pool.close()

    @property
    def _may_request(self) -> bool:
        """Whether the setting and the memory limit allow one more batch ahead."""
        ahead = self._next_request - self.next_step
        fits = (ahead + 1) * self._waits.batch_bytes <= self._limits.memory_bytes
        return self._next_request < self._last and ahead < self._tuner.setting.depth and (fits or not ahead)

    def _put(self, step: int, item: Item) -> None:
        if not isinstance(item, StepBatch):
            self._last = min(self._last, step)  # request nothing beyond the failed step
        with self._changed:
            self._ready[step] = item
            self._changed.notify()

    def _read(self, step: int) -> Item:
        """Load a step in this thread."""
        began = time.perf_counter()

        def at(sample_id: int) -> None:
            self._at = sample_id

        try:
            loaded = self._feed.load(step, at)
            self._at = NO_SAMPLE
            return self._to_batch(step, loaded, time.perf_counter() - began)
        except UserError as error:
            return error
        except Exception as error:
            fault = self._fault(_raised(error), step, sample=self._at)
            fault.__cause__ = error
            return fault

    def _item(self, result: WorkerResult) -> Item:
        """Return the batch of a worker's result, or its fault."""
        error, how = result.loaded, ""
        if isinstance(error, LoadedArrays):
            try:
                return self._to_batch(result.step, error, result.seconds, copy=True)
            except UserError as mistake:
                return mistake
            except Exception as mistake:
                error, how = mistake, _raised(mistake)
        elif isinstance(error, UserError):
            return error.with_traceback(None)  # frames would keep shared memory
        elif isinstance(error, DeadWorkerError):
            how = f"crashed ({error})"
        elif isinstance(error, HungWorkerError):
            how = f"has hung: {error}"
        else:
            how = f"raised {str(error).rstrip().splitlines()[-1][:MAX_ERROR_CHARACTERS]}"
        fault = self._fault(how, result.step, who=(result.worker, result.pid), sample=result.sample)
        if isinstance(error, RaisedInWorkerError):  # its message has the traceback; frames would keep shared memory
            fault.__cause__ = error.with_traceback(None)
        return fault

    def _to_batch(self, step: int, loaded: LoadedArrays, seconds: float, *, copy: bool = False) -> StepBatch:
        """Return the batch as tensors of this process. Arrays in shared memory must be copied (`copy`)."""
        began = time.perf_counter()
        num_bytes = sum(each.nbytes for each in loaded.arrays.values())
        if not self._waits.batch_bytes:
            self._tuner.set_batch_bytes(num_bytes)
        pin = self._tuner.setting.pin
        arrays = {name: _tensor(each, pin=pin, copy=copy) for name, each in loaded.arrays.items()}
        self._waits.record_load(seconds, time.perf_counter() - began, num_bytes)
        sample_ids = self.sample_ids(step)
        return StepBatch(step, arrays, loaded.num_valid, sample_ids, loaded.offsets, loaded.metrics, loaded.bad)

    def _fault(
        self, what: str, step: int, *, who: tuple[int | None, int | None] = (None, None), sample: int = NO_SAMPLE
    ) -> LoaderFault:
        # A worker may already be at a later step; then its sample does not belong to this one.
        sample_ids = (sample,) if sample in self.sample_ids(step) else ()
        return LoaderFault(what, worker=who[0], pid=who[1], step=step, sample_ids=sample_ids)


def _raised(error: Exception) -> str:
    return f"raised {f'{type(error).__name__}: {error}'[:MAX_ERROR_CHARACTERS]}"


def _tensor(array: np.ndarray, *, pin: bool, copy: bool) -> Tensor:
    if not pin:
        return torch.from_numpy(array.copy() if copy else array)
    dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    tensor = torch.empty(array.shape, dtype=dtype, pin_memory=True)  # from torch's caching host allocator
    np.copyto(tensor.numpy(), array)
    return tensor
