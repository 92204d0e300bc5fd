"""Copies a rank's share into slots of memory. On a GPU that happens behind the next forward and backward."""

import threading
import time
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from trimaran.checkpoint.memory import Berth, Label, Slot, pack_items
from trimaran.checkpoint.pieces import Piece
from trimaran.checkpoint.share import Share, values_of, view_of

Pairs = tuple[list[Tensor], list[Tensor]]
"""Where values go to, and where they come from."""


class Copier:
    """Copies the share out of `state`'s pieces, again and again. This one is for a state in the memory of the host."""

    def __init__(self, share: Share) -> None:
        self.share, self.items = share, pack_items(share.items)
        self.stall_seconds = 0.0
        """How long the last copy whose time is known kept training from going on."""
        self._pieces: Sequence[Piece] = ()
        self._views: dict[Slot, tuple[Pairs, Pairs]] = {}

    def copy(self, slot: Slot, label: Label, pieces: Sequence[Piece]) -> None:
        """Put the values of `pieces` into `slot`. They must not change before `before_update`."""
        began = time.perf_counter()
        slot.open()
        now, later = self._pairs(slot, pieces)
        for pairs in (now, later):
            _copy(pairs)
        slot.seal(label, self.items, self.share.num_bytes)
        self.stall_seconds = time.perf_counter() - began

    def before_update(self) -> None:
        """Come before anything that changes the state: what is being copied is copied first."""

    def settle(self) -> None:
        """Return when the last copy is sealed."""

    def _pairs(self, slot: Slot, pieces: Sequence[Piece]) -> tuple[Pairs, Pairs]:
        """Return what is copied at once, and what may be while a forward and a backward run.

        What is frozen is in a slot after the first time.
        """
        if pieces is not self._pieces:  # tensors have moved
            self._pieces, self._views = pieces, {}
        if slot in self._views:
            return self._views[slot]
        moving, frozen = (_split(self.share, pieces, slot, frozen=each) for each in (False, True))
        self._views[slot] = moving
        now, later = ((a[0] + b[0], a[1] + b[1]) for a, b in zip(moving, frozen, strict=True))
        return now, later


class DeviceCopier(Copier):
    """Copies from a GPU into pinned memory on a stream of its own, and seals in a thread of its own."""

    def __init__(self, share: Share, berth: Berth, device: torch.device) -> None:
        super().__init__(share)
        self._stream = torch.cuda.Stream(device)
        self._pinned = Pinned(berth.memory)
        self._waits: list[torch.cuda.Event] = []
        self._copied: torch.cuda.Event | None = None
        self._sealed = threading.Event()
        self._sealed.set()
        self._failure: BaseException | None = None
        self._queue: SimpleQueue[tuple[torch.cuda.Event, Slot, Label]] = SimpleQueue()
        threading.Thread(target=self._seal_all, name="trimaran-seal", daemon=True).start()

    def copy(self, slot: Slot, label: Label, pieces: Sequence[Piece]) -> None:
        self.settle()
        self._measure()
        slot.open()
        now, later = self._pairs(slot, pieces)
        began = _mark()
        _copy(now)  # in the order of the work: the next forward comes after
        self._waits = [began, _mark()]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy(later)
            copied = _mark()
        self._copied = copied
        self._sealed.clear()
        self._queue.put((copied, slot, label))

    def before_update(self) -> None:
        if self._copied is not None:
            began = _mark()
            torch.cuda.current_stream().wait_event(self._copied)
            self._waits += [began, _mark()]
            self._copied = None

    def settle(self) -> None:
        self._sealed.wait()
        if self._failure is not None:
            raise self._failure

    def _measure(self) -> None:
        if len(self._waits) == 4 and self._waits[-1].query():
            first, second, third, fourth = self._waits
            self.stall_seconds = (first.elapsed_time(second) + third.elapsed_time(fourth)) / 1000

    def _seal_all(self) -> None:
        while True:
            copied, slot, label = self._queue.get()
            try:
                copied.synchronize()
                slot.seal(label, self.items, self.share.num_bytes)
            except Exception as error:  # for the thread that trains
                self._failure = error
            self._sealed.set()


class Pinned:
    """Keeps the pages of `memory` where the GPU can reach them, until it is dropped."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
        self._release = partial(runtime.cudaHostUnregister, memory.data_ptr())

    def __del__(self) -> None:
        self._release()


def _split(share: Share, pieces: Sequence[Piece], slot: Slot, *, frozen: bool) -> tuple[Pairs, Pairs]:
    fluid = {piece.key for piece in pieces if piece.fluid}
    now: Pairs = ([], [])
    later: Pairs = ([], [])
    for item, values in zip(share.items, values_of(share, pieces), strict=True):
        if item.frozen == frozen:
            target = now if item.key in fluid or not values.is_cuda else later
            target[0].append(view_of(slot.data, item))
            target[1].append(values)
    return now, later


@torch.no_grad()
def _copy(pairs: Pairs) -> None:
    if pairs[0]:
        torch._foreach_copy_(*pairs, non_blocking=True)


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
