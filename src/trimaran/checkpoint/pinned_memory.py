"""Memory that a GPU reaches by itself: taken and pinned in a thread, while a run begins to train."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from trimaran.checkpoint.memory_copies import RankMemory
from trimaran.checkpoint.tensor_shards import Composed

log = logging.getLogger(__name__)

STRETCH = 1 << 28
"""Bytes that are pinned together. Nothing else gets at the GPU meanwhile: 15 GB at once held training up for 8 s."""


class Pinned:
    """Keeps the pages of `memory` where the GPU can reach them, until it is dropped."""

    def __init__(self, memory: Tensor) -> None:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
        release: Any = finalize(self, _release, runtime, memory)
        release.atexit = False  # the end of the process does it, and is quicker


def _release(runtime: Any, memory: Tensor) -> None:
    runtime.cudaHostUnregister(memory.data_ptr())


class Preparation:
    """Takes the memory of a rank memory, then has `pin` pin it slot by slot, behind the back of who goes on meanwhile.

    For a state of some ten gigabytes that takes about as many seconds, in which the first step can be compiled. `pin`
    runs in this thread, gets a stretch of a slot at a time, and returns what keeps it pinned until it is dropped.
    Between two stretches training has its turn.
    """

    def __init__(self, rank_memory: RankMemory, pin: Callable[[Tensor], object]) -> None:
        self._rank_memory, self._pin = rank_memory, pin
        self._pins: list[object] = []
        self._is_lacking = self._is_off = False
        self._failure: Exception | None = None
        self._over = threading.Event()
        # Not a daemon, since a process that ends while one is inside CUDA is aborted. Its end does not wait for long:
        # see `_goes_on`.
        threading.Thread(target=self._work, name="trimaran-pin", daemon=False).start()

    @property
    def is_over(self) -> bool:
        """Whether it is known if there is memory."""
        return self._over.is_set()

    @property
    def is_pinned(self) -> bool:
        """Whether all slots are pinned, once it is over. Where the system allows no more of it, none is."""
        return bool(self._pins)

    def wait(self) -> bool:
        """Return whether there is memory, as soon as that is known."""
        self._over.wait()
        if self._failure is not None:
            raise self._failure
        return not self._is_lacking

    def let_go(self) -> None:
        """Stop, and pin nothing any more. The memory stays with the rank memory."""
        self._is_off = True
        self._over.wait()
        self._pins.clear()

    def _goes_on(self) -> bool:
        return not self._is_off and threading.main_thread().is_alive()

    def _work(self) -> None:
        try:
            self._rank_memory.take(self._goes_on)
            for stretch in (each for slot in self._rank_memory.slots for each in slot.memory.split(STRETCH)):
                if self._goes_on():
                    began = time.monotonic()
                    self._pins.append(self._pin(stretch))
                    time.sleep(time.monotonic() - began)
        except OSError:
            self._is_lacking = True
        except RuntimeError as error:  # the system lets no more memory be pinned: each copy holds training up
            self._pins.clear()
            log.warning("checkpoints are copied while training waits: %s", error)
        except Exception as error:  # for the thread that trains
            self._failure = error
        finally:
            self._over.set()


def within_stretches(
    slot: Tensor, target: Tensor, values: Tensor | Composed
) -> Iterator[tuple[Tensor, Tensor | Composed]]:
    """Yield `target`, a part of `slot`'s memory, and the values for it in pieces of which none spans two stretches.

    A GPU copies into one stretch at a time only. Rows stay whole but for those that an end of a stretch runs through.
    """
    first = target.data_ptr() - slot.data_ptr()
    room = STRETCH - first % STRETCH
    if target.nbytes <= room:
        yield target, values
        return
    row = target.nbytes // len(target)
    whole, rest = divmod(room, row)
    if whole:
        yield target[:whole], values[:whole]
    if rest:
        yield from within_stretches(slot, target[whole], values[whole])
        whole += 1
    if whole < len(target):
        yield from within_stretches(slot, target[whole:], values[whole:])
