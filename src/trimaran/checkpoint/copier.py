"""Copies a rank's share into slots of memory. On a GPU that happens behind the next forward and backward."""

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from trimaran.checkpoint.memory_copies import Label, MemorySlot, RankMemory, pack_items
from trimaran.checkpoint.pinned_memory import Pinned, Preparation, within_stretches
from trimaran.checkpoint.rank_share import RankShare, copy_out, values_of, view_of
from trimaran.checkpoint.tensor_shards import Composed, TensorShard

Pairs = tuple[list[Tensor], list[Tensor | Composed]]
"""Where values go to, and where they come from."""


class Copier:
    """Copies the share out of `state`'s pieces, again and again. This one is for a state in the memory of the host."""

    prepares = False
    """Whether the memory is still being taken when this has been made."""

    def __init__(self, share: RankShare) -> None:
        self.share, self.items = share, pack_items(share.items)
        self.stall_seconds = 0.0
        """How long the last copy whose time is known kept training from going on."""
        self._pieces: Sequence[TensorShard] = ()
        self._views: dict[MemorySlot, tuple[Pairs, Pairs]] = {}

    def copy(self, slot: MemorySlot, label: Label, pieces: Sequence[TensorShard]) -> None:
        """Put the values of `pieces` into `slot`. They must not change before `before_update`."""
        began = time.perf_counter()
        slot.open()
        now, later = self._pairs(slot, pieces)
        for pairs in (now, later):
            _copy(pairs)
        if any(each.tensor.is_cuda for each in pieces):  # most systems have waited by now, but none has to
            torch.cuda.current_stream().synchronize()
        slot.seal(label, self.items, self.share.num_bytes)
        self.stall_seconds = time.perf_counter() - began

    def before_update(self) -> None:
        """Come before anything that changes the state: what is being copied is copied first."""

    def settle(self) -> None:
        """Return when the last copy is sealed."""

    @property
    def is_ready(self) -> bool:
        """Whether a copy could begin now, or never can."""
        return True

    def wait_ready(self) -> bool:
        """Return whether there is memory to copy to, as soon as that is known."""
        return True

    def let_go(self) -> None:
        """Give back what copying takes besides the slots. Nobody copies any more."""

    def _pairs(self, slot: MemorySlot, pieces: Sequence[TensorShard]) -> tuple[Pairs, Pairs]:
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
    """Copies from a GPU into pinned memory on a stream of its own, and seals in a thread of its own.

    The memory is taken and pinned behind the first steps, too; see `Preparation`.
    """

    prepares = True

    def __init__(self, share: RankShare, rank_memory: RankMemory, device: torch.device) -> None:
        super().__init__(share)
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.Stream(device)
        self._waits: list[torch.cuda.Event] = []
        self._copied: torch.cuda.Event | None = None
        self._sealed = threading.Event()
        self._sealed.set()
        self._failure: BaseException | None = None
        self._queue: SimpleQueue[tuple[torch.cuda.Event, MemorySlot, Label] | None] = SimpleQueue()
        threading.Thread(target=self._seal_all, name="trimaran-seal", daemon=True).start()
        self._preparation = Preparation(rank_memory, self._pin)

    @property
    def is_ready(self) -> bool:
        return self._preparation.is_over

    def wait_ready(self) -> bool:
        return self._preparation.wait()

    def let_go(self) -> None:
        self._queue.put(None)
        self._preparation.let_go()

    def copy(self, slot: MemorySlot, label: Label, pieces: Sequence[TensorShard]) -> None:
        assert self.wait_ready(), "without memory nobody copies"
        if not self._preparation.is_pinned:
            super().copy(slot, label, pieces)
            return
        entered = time.perf_counter()
        self.settle()
        self._measure(waited=time.perf_counter() - entered)
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

    def _measure(self, *, waited: float) -> None:
        """Note what the last copy cost: how long the device waited for it, and the host for its seal."""
        if len(self._waits) == 4 and self._waits[-1].query():
            first, second, third, fourth = self._waits
            self.stall_seconds = waited + (first.elapsed_time(second) + third.elapsed_time(fourth)) / 1000

    def _pin(self, memory: Tensor) -> Pinned:
        torch.cuda.set_device(self._device)  # of the thread, which would otherwise wake the first one
        return Pinned(memory)

    def _seal_all(self) -> None:
        while (task := self._queue.get()) is not None:
            copied, slot, label = task
            try:
                copied.synchronize()
                slot.seal(label, self.items, self.share.num_bytes)
            except Exception as error:  # for the thread that trains
                self._failure = error
            self._sealed.set()


def _split(share: RankShare, pieces: Sequence[TensorShard], slot: MemorySlot, *, frozen: bool) -> tuple[Pairs, Pairs]:
    fluid = {piece.key for piece in pieces if piece.fluid}
    now: Pairs = ([], [])
    later: Pairs = ([], [])
    for item, values in zip(share.items, values_of(share, pieces), strict=True):
        if item.frozen == frozen:
            target = now if item.key in fluid or not values.is_cuda else later
            for into, part in within_stretches(slot.memory, view_of(slot.data, item), values):
                target[0].append(into)
                target[1].append(part)
    return now, later


@torch.no_grad()
def _copy(pairs: Pairs) -> None:
    targets, sources = [], []
    for target, values in zip(*pairs, strict=True):
        if isinstance(values, Tensor):
            targets.append(target)
            sources.append(values)
        else:
            copy_out(values, target, non_blocking=True)
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
