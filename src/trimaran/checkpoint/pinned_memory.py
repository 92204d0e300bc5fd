"""Pinned host memory: allocated and pinned in a thread while the run starts to train."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from trimaran.checkpoint.memory_copies import PAGE_BYTES, RankMemory
from trimaran.parallel.tensor_shards import TensorLike

log = logging.getLogger(__name__)

PIN_CHUNK_BYTES = 1 << 28
"""Bytes pinned per call. A call blocks all other use of the GPU: pinning 15 GB at once stalled training for 8 s."""


class PinnedMemory:
    """Keeps the pages of `memory` pinned until this object is dropped."""

    def __init__(self, memory: Tensor) -> None:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
        release: Any = finalize(self, _release, runtime, memory)
        release.atexit = False  # the end of the process unpins it, and faster


def _release(runtime: Any, memory: Tensor) -> None:
    runtime.cudaHostUnregister(memory.data_ptr())


class BackgroundPinning:
    """Allocates a rank memory, then pins it slot by slot, in a thread while training continues.

    This takes about one second per gigabyte, during which the first step can compile. The thread calls `pin` with one
    chunk of a slot at a time; `pin` returns an object that keeps the chunk pinned until it is dropped. Between two
    chunks the thread sleeps, so that training can use the GPU. `prepare` is called first, in the same thread.
    """

    def __init__(
        self,
        rank_memory: RankMemory,
        pin: Callable[[Tensor], object],
        prepare: Callable[[], None] = lambda: None,
        *,
        chunk_bytes: int = PIN_CHUNK_BYTES,
    ) -> None:
        self._rank_memory, self._pin, self._prepare = rank_memory, pin, prepare
        self._chunk_bytes = chunk_bytes
        self._pins: list[object] = []
        self._lacks_memory = False
        self.is_cancelled = False
        self._failure: Exception | None = None
        self._done = threading.Event()
        # Not a daemon: a process that ends while a thread is inside CUDA is aborted. `_should_continue` stops the
        # thread soon after the main thread has ended.
        threading.Thread(target=self._work, name="trimaran-pin", daemon=False).start()

    @property
    def is_done(self) -> bool:
        """Whether it is known if there is enough memory."""
        return self._done.is_set()

    @property
    def is_pinned(self) -> bool:
        """Whether all slots are pinned, once this is done. If the system limits pinning, none is."""
        return bool(self._pins)

    def wait(self) -> bool:
        """Return whether there is enough memory, as soon as that is known."""
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        return not self._lacks_memory

    def release(self) -> None:
        """Stop, and unpin everything. The rank memory stays allocated."""
        self.is_cancelled = True
        self._done.wait()
        self._pins.clear()

    def _should_continue(self) -> bool:
        return not self.is_cancelled and threading.main_thread().is_alive()

    def _work(self) -> None:
        try:
            self._prepare()
            self._rank_memory.allocate(self._should_continue)
            for chunk in (each for slot in self._rank_memory.slots for each in slot.memory.split(self._chunk_bytes)):
                if self._should_continue():
                    _map_pages(chunk)
                    began = time.monotonic()
                    self._pins.append(self._pin(chunk))
                    time.sleep(time.monotonic() - began)
        except OSError:
            self._lacks_memory = True
        except RuntimeError as error:  # the system limits pinning: copies to pageable memory stall training
            self._pins.clear()
            log.warning("host memory cannot be pinned, so training waits for every copy of the state: %s", error)
        except Exception as error:  # `wait` raises it in the training thread
            self._failure = error
        finally:
            self._done.set()


def _map_pages(memory: Tensor) -> None:
    """Map every page of `memory` by reading from it. Otherwise pinning does it, and blocks the GPU meanwhile."""
    memory.numpy()[::PAGE_BYTES].max(initial=0)


def split_at_pin_chunks(
    slot: Tensor, target: Tensor, values: Tensor | TensorLike, chunk_bytes: int = PIN_CHUNK_BYTES
) -> Iterator[tuple[Tensor, Tensor | TensorLike]]:
    """Yield `target`, a slice of the memory of `slot`, and its values in parts that lie in one pinned chunk each.

    A GPU copy cannot span two pinned chunks. Only rows that cross the end of a chunk are split.
    """
    first = target.data_ptr() - slot.data_ptr()
    remaining = chunk_bytes - first % chunk_bytes
    if target.nbytes <= remaining:
        yield target, values
        return
    row_bytes = target.nbytes // len(target)
    num_rows, rest = divmod(remaining, row_bytes)
    if num_rows:
        yield target[:num_rows], values[:num_rows]
    if rest:
        yield from split_at_pin_chunks(slot, target[num_rows], values[num_rows], chunk_bytes)
        num_rows += 1
    if num_rows < len(target):
        yield from split_at_pin_chunks(slot, target[num_rows:], values[num_rows:], chunk_bytes)
