"""Copies a rank's share of the state from a GPU to memory slots, while the next forward and backward run."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

from trimaran.checkpoint.batched_copy import (
    PIN_CHUNK_BYTES,
    STAGING_BYTES,
    BackgroundPinning,
    BatchedCopy,
    Gather,
    PinnedMemory,
    Run,
    find_run,
    split_at_pin_chunks,
    split_into_pieces,
)
from trimaran.checkpoint.copier import Copier, Pairs, SourcePairs, copy_pairs
from trimaran.checkpoint.memory_copies import CopyMetadata, MemorySlot, RankMemory
from trimaran.parallel import RankShare, TensorShard, item_values, item_view

log = logging.getLogger(__name__)


@dataclass(slots=True)
class DeviceTransfers:
    """What a `DeviceCopier` copies to every slot: `before_forward`, and the rest while the next forward runs.

    `batched` are copied with few launches, `single` one by one. Frozen tensors are copied to a slot only once.
    """

    before_forward: SourcePairs
    single: SourcePairs
    batched: BatchedCopy
    frozen: SourcePairs
    filled: set[MemorySlot] = field(default_factory=set)
    pairs: dict[MemorySlot, tuple[Pairs, Pairs]] = field(default_factory=dict)


class DeviceCopier(Copier):
    """Copies from a GPU to pinned memory on its own stream, and commits the slots in its own thread.

    The memory is allocated and pinned during the first steps; see `BackgroundPinning`. A copier that replaces
    `before` takes over the memory that this one has pinned.
    """

    allocates_in_background = True

    def __init__(
        self,
        share: RankShare,
        rank_memory: RankMemory,
        device: torch.device,
        before: "DeviceCopier | None" = None,
        *,
        chunk_bytes: int = PIN_CHUNK_BYTES,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        super().__init__(share)
        self._chunk_bytes = chunk_bytes
        self._staging_bytes = staging_bytes
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._stream = torch.cuda.Stream(self._device)
        self._timings: deque[list[torch.cuda.Event]] = deque()
        """Of each copy whose wait is not known yet: pairs of events, between which the GPU waited for the copy."""
        self._last_wait_seconds = 0.0
        self._copied: torch.cuda.Event | None = None
        self._committed = threading.Event()
        self._committed.set()
        self._failure: BaseException | None = None
        self._queue: SimpleQueue[tuple[torch.cuda.Event, MemorySlot, CopyMetadata, float] | None] = SimpleQueue()
        self._transfers: DeviceTransfers | None = None
        self._gather: Gather | None = before._gather if before else None
        threading.Thread(target=self._commit_all, name="trimaran-commit", daemon=True).start()
        self._pinning = (
            before._end()
            if before
            else BackgroundPinning(rank_memory, self._pin, prepare=self._compile_gather, chunk_bytes=self._chunk_bytes)
        )

    def prepare(self, slots: Sequence[MemorySlot], shards: Sequence[TensorShard]) -> None:
        """Do nothing: the memory is not there yet."""

    @property
    def is_ready(self) -> bool:
        return self._pinning.is_done

    def wait_ready(self) -> bool:
        return self._pinning.wait()

    @property
    def pinned(self) -> "DeviceCopier | None":
        return self if self.is_ready else None

    def release(self) -> None:
        self._end().release()

    def _end(self) -> BackgroundPinning:
        """End the thread that commits, and return what keeps the memory pinned."""
        self._queue.put(None)
        return self._pinning

    def copy(self, slot: MemorySlot, metadata: CopyMetadata, shards: Sequence[TensorShard]) -> None:
        assert self.wait_ready(), "a copy was asked for without memory"
        if not self._pinning.is_pinned:
            super().copy(slot, metadata, shards)
            self._num_copies = 0
            self._timings.append([])
            return
        entered = time.perf_counter()
        self.wait()
        slot.invalidate()
        if shards is not self._shards or self._transfers is None:  # tensors have moved
            self._shards, self._transfers = shards, self._plan_transfers(slot, shards)
        transfers = self._transfers
        if slot not in transfers.pairs:
            transfers.pairs[slot] = (
                self._pairs_of(slot, transfers.before_forward),
                self._pairs_of(slot, transfers.single),
            )
        before_forward, single = transfers.pairs[slot]
        timing = []  # events before and after what the next forward waits for
        if before_forward[0]:
            timing.append(_timed_event())
            copy_pairs(before_forward)
            timing.append(_timed_event())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if slot not in transfers.filled:
                transfers.filled.add(slot)
                copy_pairs(self._pairs_of(slot, transfers.frozen))
            copy_pairs(single)
            transfers.batched.start(slot)
            # The commit thread sleeps until this event. Waiting without `blocking` would take a core.
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()
        self._timings.append(timing)
        assert self._copied is not None
        self._committed.clear()
        self._queue.put((self._copied, slot, metadata, entered))
        self.stall_seconds = time.perf_counter() - entered + self._last_wait_seconds

    def before_update(self) -> None:
        if self._copied is not None:
            began = _timed_event()
            torch.cuda.current_stream().wait_event(self._copied)
            self._timings[-1] += [began, _timed_event()]
            self._copied = None

    def wait(self) -> None:
        self._committed.wait()
        if self._failure is not None:
            raise self._failure

    def device_waits(self) -> list[float]:
        waits = []
        while self._timings:
            is_waited_for = self._copied is None or len(self._timings) > 1
            if not is_waited_for or (self._timings[0] and not self._timings[0][-1].query()):
                break
            events = self._timings.popleft()
            waits.append(sum(a.elapsed_time(b) for a, b in zip(events[::2], events[1::2], strict=True)) / 1000)
            self._last_wait_seconds = waits[-1]
        return waits

    def _plan_transfers(self, slot: MemorySlot, shards: Sequence[TensorShard]) -> DeviceTransfers:
        changed_by_forward = {shard.key for shard in shards if shard.changed_by_forward}
        before_forward: SourcePairs = []
        single: SourcePairs = []
        frozen: SourcePairs = []
        runs: list[Run] = []
        header_bytes = slot.data.data_ptr() - slot.memory.data_ptr()
        for item, values in zip(self.share.items, item_values(self.share, shards), strict=True):
            if item.frozen:
                frozen.append((item, values))
            elif item.key in changed_by_forward or not values.is_cuda:
                before_forward.append((item, values))
            elif self._gather is not None and (run := find_run(header_bytes + item.offset, values)) is not None:
                runs.append(run)
            else:
                single.append((item, values))
        pieces = split_into_pieces(runs, chunk_bytes=self._chunk_bytes, staging_bytes=self._staging_bytes)
        batched = BatchedCopy(pieces, self._device, self._stream, self._gather or _no_gather)
        return DeviceTransfers(before_forward, single, batched, frozen)

    def _pairs_of(self, slot: MemorySlot, sources: SourcePairs) -> Pairs:
        """See `Copier._pairs_of`. No part crosses the end of a pinned chunk."""
        pairs: Pairs = ([], [])
        for item, values in sources:
            target = item_view(slot.data, item)
            for into, part in split_at_pin_chunks(slot.memory, target, values, self._chunk_bytes):
                pairs[0].append(into)
                pairs[1].append(part)
        return pairs

    def _pin(self, memory: Tensor) -> PinnedMemory:
        torch.cuda.set_device(self._device)  # per thread; without it this thread would create a context on GPU 0
        return PinnedMemory(memory)

    def _compile_gather(self) -> None:
        """Compile the kernel before the first copy, in the thread that pins memory: that takes up to a second."""
        torch.cuda.set_device(self._device)
        try:
            from trimaran.checkpoint.gather_kernel import gather_values  # noqa: PLC0415  needs Triton

            with torch.cuda.stream(self._stream):
                rows = torch.zeros(1, 4, dtype=torch.int64, device=self._device)  # of no values
                gather_values(rows, torch.zeros(4, dtype=torch.int32, device=self._device))
        except Exception as error:  # whatever is wrong with Triton, the state can be copied without it
            log.warning("copies of the state take more launches, since their kernel cannot be used: %s", error)
            return
        self._gather = gather_values

    def _commit_all(self) -> None:
        while (task := self._queue.get()) is not None:
            copied, slot, metadata, began = task
            try:
                copied.synchronize()
                slot.commit(metadata, self.items, self.share.num_bytes)
                self.commit_seconds, self.has_committed = time.perf_counter() - began, True
            except Exception as error:  # `wait` raises it in the training thread
                self._failure = error
            self._committed.set()


def _no_gather(rows: Tensor, into: Tensor) -> None:
    assert not len(rows), "without the kernel nothing is gathered"


def _timed_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
