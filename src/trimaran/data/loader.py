"""Batches of one rank, loaded while it computes. Which samples they hold is a function of the step alone."""

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
import torch
from torch import Tensor

from trimaran.core import UserError
from trimaran.data.feed import BatchFeed, LoadedArrays
from trimaran.data.loader_tuner import AHEAD, LoaderChange, LoaderLimits, Setting, Tuner, loader_limits_here
from trimaran.data.loader_waits import LoaderWaits
from trimaran.data.loader_worker import NO_SAMPLE, START_SECONDS, DeadWorkerError, HungWorkerError, RaisedInWorkerError
from trimaran.data.step_batch import StepBatch
from trimaran.data.worker_pool import RESTARTS, WorkerAnswer, WorkerPool

log = logging.getLogger(__name__)

NAMED_CHARACTERS = 300


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


Item = StepBatch | LoaderFault | UserError


class Loader:
    """Yields the batches of steps `start_step` to `steps` (exclusive), always loading a few ahead.

    A thread loads them, or collects what `workers` processes load. `auto` begins with the thread and changes how many
    there are while it goes, by how long the trainer waits and by what `room` there is (see `tuner`); a number stays.
    A loader that is silent for `timeout_seconds` has hung. A process that hangs or dies is replaced.
    """

    def __init__(
        self,
        feed: BatchFeed,
        *,
        start_step: int = 0,
        steps: int,
        workers: int | Literal["auto"] = 0,
        timeout_seconds: float = 60.0,
        room: LoaderLimits | None = None,
    ) -> None:
        self._feed, self._steps, self._timeout_seconds = feed, range(start_step, steps), timeout_seconds
        self._room = room or loader_limits_here()
        number = 0 if workers == "auto" else workers
        setting = Setting(workers=number, depth=number + AHEAD, pin=self._room.pin_memory)
        self._tuner = Tuner(self._room, setting, fixed=workers != "auto")
        self.changes: list[LoaderChange] = []
        self._waits = LoaderWaits()
        self._team = WorkerPool(feed.load, timeout_seconds=timeout_seconds)
        self._at = NO_SAMPLE  # the sample that the thread is at
        self._next_step, self._asked, self._last = start_step, start_step, steps
        self._ready: dict[int, Item] = {}
        self._changed = threading.Condition()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # rung when the thread should look again
        self._closed, self._closing = False, threading.Lock()
        self._device = torch.accelerator.current_device_index() if self._room.pin_memory else None
        self._team.resize(number)  # here, before there are more threads than there have to be
        self._thread = threading.Thread(target=self._load_ahead, name="trimaran-loader", daemon=True)
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
        began = time.monotonic()
        item = self._take()
        if not isinstance(item, StepBatch):
            self.close()
            raise item
        self._next_step += 1
        self._waits.took(began)
        self._tune()
        os.eventfd_write(self._bell, 1)  # there is room for another
        return item

    def _take(self) -> Item:
        """Return what comes next. A process may be replaced a few times before a step is given up."""
        patience = (self._timeout_seconds + START_SECONDS) * (1 + RESTARTS) if self._team else self._timeout_seconds
        with self._changed:
            if not self._changed.wait_for(lambda: self._next_step in self._ready, timeout=patience):
                hung = f"has hung: nothing came for {patience:g} s"
                return self._fault(hung, self._next_step, sample=self._at)
            return self._ready.pop(self._next_step)

    def _tune(self) -> None:
        """Now and then, look at how long was waited and change how batches are loaded. The thread follows."""
        if (seen := self._waits.window()) and (chosen := self._tuner.choose(seen)):
            setting, reason = chosen
            self.changes.append(LoaderChange(self._next_step, setting, reason))
            self._waits.settle(setting.depth)
            log.info("%d loader processes, %d batches ahead: %s", setting.workers, setting.depth, reason)

    def facts(self) -> dict[str, Any]:
        """Return how batches are loaded now, and how long the trainer has waited for them in all, and for the last."""
        now = self._tuner.setting
        return {"workers": now.workers, "depth": now.depth, "pinned": now.pin, **self._waits.facts()}

    def close(self) -> None:
        """End the processes and the thread. Batches that were loaded ahead are dropped."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._team.kill()
        atexit.unregister(self.close)
        os.eventfd_write(self._bell, 1)  # the thread may be waiting
        self._thread.join(timeout=1.0)  # unless it hangs in a read; then it ends with the process
        if not self._thread.is_alive():
            os.close(self._bell)
        self._ready.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def sample_ids(self, step: int) -> tuple[int, ...]:
        """Return which samples this rank works on at `step`, in the order of the rows."""
        return self.samples(step, [self._feed.share.rank])

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        """Return which samples the given ranks, of those that see different ones, work on at `step`."""
        return self._feed.samples(step, data_ranks)

    def num_quarantined(self, step: int) -> int:
        """Return how many samples of the global batch are left out at `step`."""
        return self._feed.num_quarantined(step)

    def _load_ahead(self) -> None:
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)  # a thread starts on device 0, whichever the rank's is
        while not self._closed and self._next_step < self._last:
            self._team.resize(self._tuner.setting.workers)
            if not (len(self._team) or self._team.owed) and self._may_ask:
                self._put(self._asked, self._read(self._asked))
                self._asked += 1
                continue
            while self._may_ask and self._team.ask(self._asked):
                self._asked += 1
            for answer in self._team.collect(self._bell):
                self._put(answer.step, self._item(answer))
            answer = None  # its arrays lie in memory that the next fork must not inherit
            with suppress(BlockingIOError):  # it was not rung
                os.eventfd_read(self._bell)
        self._team.let_go()

    @property
    def _may_ask(self) -> bool:
        """Whether one more batch may be on its way: as many as are wanted ahead, and as memory has room for."""
        ahead = self._asked - self._next_step
        fits = (ahead + 1) * self._waits.batch_bytes <= self._room.memory_bytes
        return self._asked < self._last and ahead < self._tuner.setting.depth and (fits or not ahead)

    def _put(self, step: int, item: Item) -> None:
        if not isinstance(item, StepBatch):
            self._last = min(self._last, step)  # it goes no further than that
        with self._changed:
            self._ready[step] = item
            self._changed.notify()

    def _read(self, step: int) -> Item:
        """Load a step in this thread."""
        began = time.perf_counter()

        def at(sample_id: int) -> None:
            self._at = sample_id

        try:
            load = self._feed.load(step, at)
            self._at = NO_SAMPLE
            return self._landed(step, load, time.perf_counter() - began)
        except UserError as error:
            return error
        except Exception as error:
            fault = self._fault(f"raised {_short(f'{type(error).__name__}: {error}')}", step, sample=self._at)
            fault.__cause__ = error
            return fault

    def _item(self, answer: WorkerAnswer) -> Item:
        """Return what a worker's answer comes to."""
        error, how = answer.load, ""
        if isinstance(error, LoadedArrays):
            try:
                return self._landed(answer.step, error, answer.seconds, copy=True)
            except UserError as mistake:
                return mistake
            except Exception as mistake:
                error, how = mistake, f"raised {_short(f'{type(mistake).__name__}: {mistake}')}"
        elif isinstance(error, DeadWorkerError):
            how = f"crashed ({error})"
        elif isinstance(error, HungWorkerError):
            how = f"has hung: {error}"
        else:
            how = f"raised {_short(str(error).rstrip().splitlines()[-1])}"
        fault = self._fault(how, answer.step, who=(answer.worker, answer.pid), sample=answer.sample)
        if isinstance(error, RaisedInWorkerError):  # its words say where; its frames would keep shared memory alive
            fault.__cause__ = error.with_traceback(None)
        return fault

    def _landed(self, step: int, load: LoadedArrays, seconds: float, *, copy: bool = False) -> StepBatch:
        """Return the batch as tensors of this process. What lies in shared memory has to be copied."""
        began = time.perf_counter()
        num_bytes = sum(each.nbytes for each in load.arrays.values())
        if not self._waits.batch_bytes:
            self._tuner.first(num_bytes)
        pin = self._tuner.setting.pin
        arrays = {name: _tensor(each, pin=pin, copy=copy) for name, each in load.arrays.items()}
        self._waits.loaded(seconds, time.perf_counter() - began, num_bytes)
        return StepBatch(step, arrays, load.num_valid, self.sample_ids(step), load.cuts, load.facts, load.bad)

    def _fault(
        self, what: str, step: int, *, who: tuple[int | None, int | None] = (None, None), sample: int = NO_SAMPLE
    ) -> LoaderFault:
        # A worker may be ahead of what is owed, and then its sample is not one of the step's.
        sample_ids = (sample,) if sample in self.sample_ids(step) else ()
        return LoaderFault(what, worker=who[0], pid=who[1], step=step, sample_ids=sample_ids)


def _tensor(array: np.ndarray, *, pin: bool, copy: bool) -> Tensor:
    if not pin:
        return torch.from_numpy(array.copy() if copy else array)
    dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    tensor = torch.empty(array.shape, dtype=dtype, pin_memory=True)  # from torch's pool: used again once it is free
    np.copyto(tensor.numpy(), array)
    return tensor


def _short(what: str) -> str:
    return what[:NAMED_CHARACTERS]
