"""Copies a rank's share to memory slots. From a GPU the copy overlaps with the next forward and backward."""

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from trimaran.checkpoint.memory_copies import CopyMetadata, MemorySlot, RankMemory, encode_items
from trimaran.checkpoint.pinned_memory import BackgroundPinning, PinnedMemory, split_at_pin_chunks
from trimaran.checkpoint.rank_share import RankShare, copy_values, item_values, item_view
from trimaran.checkpoint.tensor_shards import TensorLike, TensorShard

Pairs = tuple[list[Tensor], list[Tensor | TensorLike]]
"""Targets and sources of copies."""


class Copier:
    """Copies this rank's share of the state to memory slots. This class copies synchronously, from host memory."""

    allocates_in_background = False
    """Whether a thread may still be allocating the slots after `__init__` has returned."""

    def __init__(self, share: RankShare) -> None:
        self.share, self.items = share, encode_items(share.items)
        self.stall_seconds = 0.0
        """How long the last copy that has been timed stalled training."""
        self._shards: Sequence[TensorShard] = ()
        self._views: dict[MemorySlot, tuple[Pairs, Pairs]] = {}

    def copy(self, slot: MemorySlot, metadata: CopyMetadata, shards: Sequence[TensorShard]) -> None:
        """Copy the values of `shards` to `slot`. They must not change before `before_update` is called."""
        began = time.perf_counter()
        slot.invalidate()
        now, later = self._pairs(slot, shards)
        for pairs in (now, later):
            _copy(pairs)
        if any(
            each.tensor.is_cuda for each in shards
        ):  # a copy to pageable memory usually has synchronized, but CUDA does not promise it
            torch.cuda.current_stream().synchronize()
        slot.commit(metadata, self.items, self.share.num_bytes)
        self.stall_seconds = time.perf_counter() - began

    def before_update(self) -> None:
        """Make later changes of the state wait for the copy. Must be called before every update."""

    def wait(self) -> None:
        """Return when the last copy is committed."""

    @property
    def is_ready(self) -> bool:
        """Whether it is known if there is memory to copy to."""
        return True

    def wait_ready(self) -> bool:
        """Return whether there is memory to copy to, as soon as that is known."""
        return True

    def release(self) -> None:
        """Release everything but the slots. No copy may follow."""

    def _pairs(self, slot: MemorySlot, shards: Sequence[TensorShard]) -> tuple[Pairs, Pairs]:
        """Return the pairs to copy at once, and those that may be copied during the next forward and backward.

        Frozen tensors are copied to a slot only the first time.
        """
        if shards is not self._shards:  # tensors have moved
            self._shards, self._views = shards, {}
        if slot in self._views:
            return self._views[slot]
        trained, frozen = (_split(self.share, shards, slot, frozen=each) for each in (False, True))
        self._views[slot] = trained
        now, later = ((a[0] + b[0], a[1] + b[1]) for a, b in zip(trained, frozen, strict=True))
        return now, later


class DeviceCopier(Copier):
    """Copies from a GPU to pinned memory on its own stream, and commits the slots in its own thread.

    The memory is allocated and pinned during the first steps; see `BackgroundPinning`.
    """

    allocates_in_background = True

    def __init__(self, share: RankShare, rank_memory: RankMemory, device: torch.device) -> None:
        super().__init__(share)
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.Stream(device)
        self._waits: list[torch.cuda.Event] = []
        self._copied: torch.cuda.Event | None = None
        self._committed = threading.Event()
        self._committed.set()
        self._failure: BaseException | None = None
        self._queue: SimpleQueue[tuple[torch.cuda.Event, MemorySlot, CopyMetadata] | None] = SimpleQueue()
        threading.Thread(target=self._commit_all, name="trimaran-commit", daemon=True).start()
        self._pinning = BackgroundPinning(rank_memory, self._pin)

    @property
    def is_ready(self) -> bool:
        return self._pinning.is_done

    def wait_ready(self) -> bool:
        return self._pinning.wait()

    def release(self) -> None:
        self._queue.put(None)
        self._pinning.release()

    def copy(self, slot: MemorySlot, metadata: CopyMetadata, shards: Sequence[TensorShard]) -> None:
        assert self.wait_ready(), "a copy was asked for without memory"
        if not self._pinning.is_pinned:
            super().copy(slot, metadata, shards)
            return
        entered = time.perf_counter()
        self.wait()
        self._measure_stall(waited=time.perf_counter() - entered)
        slot.invalidate()
        now, later = self._pairs(slot, shards)
        began = _record_event()
        _copy(now)  # on the current stream, so before the next forward
        self._waits = [began, _record_event()]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy(later)
            copied = _record_event()
        self._copied = copied
        self._committed.clear()
        self._queue.put((copied, slot, metadata))

    def before_update(self) -> None:
        if self._copied is not None:
            began = _record_event()
            torch.cuda.current_stream().wait_event(self._copied)
            self._waits += [began, _record_event()]
            self._copied = None

    def wait(self) -> None:
        self._committed.wait()
        if self._failure is not None:
            raise self._failure

    def _measure_stall(self, *, waited: float) -> None:
        """Record how long the GPU waited for the last copy, plus how long the host waited for its commit."""
        if len(self._waits) == 4 and self._waits[-1].query():
            first, second, third, fourth = self._waits
            self.stall_seconds = waited + (first.elapsed_time(second) + third.elapsed_time(fourth)) / 1000

    def _pin(self, memory: Tensor) -> PinnedMemory:
        torch.cuda.set_device(self._device)  # per thread; without it this thread would create a context on GPU 0
        return PinnedMemory(memory)

    def _commit_all(self) -> None:
        while (task := self._queue.get()) is not None:
            copied, slot, metadata = task
            try:
                copied.synchronize()
                slot.commit(metadata, self.items, self.share.num_bytes)
            except Exception as error:  # `wait` raises it in the training thread
                self._failure = error
            self._committed.set()


def _split(share: RankShare, shards: Sequence[TensorShard], slot: MemorySlot, *, frozen: bool) -> tuple[Pairs, Pairs]:
    changed_by_forward = {shard.key for shard in shards if shard.changed_by_forward}
    now: Pairs = ([], [])
    later: Pairs = ([], [])
    for item, values in zip(share.items, item_values(share, shards), strict=True):
        if item.frozen == frozen:
            target = now if item.key in changed_by_forward or not values.is_cuda else later
            for into, part in split_at_pin_chunks(slot.memory, item_view(slot.data, item), values):
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
            copy_values(values, target, non_blocking=True)
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
