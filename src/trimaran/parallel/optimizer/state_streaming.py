"""Optimizer states on the host or a disk: streamed to the device for the update, and back."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from trimaran.core import DEVICE_TRAITS
from trimaran.parallel.disk_store import DiskStore, aligned_buffer, padded
from trimaran.parallel.optimizer.moments import States
from trimaran.parallel.tensor_shards import store_of

BufferKey = tuple[str, torch.dtype]
NUM_STAGING_BUFFERS = 3  # one chunk is copied in, one is updated, one is copied out


@dataclass(slots=True)
class StagingBuffer:
    """Device memory for one chunk at a time, and the events that mark the end of its copies."""

    memory: dict[BufferKey, Tensor]
    states: States = field(default_factory=dict)
    copied_in: Any = None
    copied_out: Any = None


class StateStream:
    """Copies states between host and device in both directions at once, on own CUDA streams; on a CPU in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._torch = device, torch.get_device_module(device)
        self._in_stream, self._out_stream = self._torch.Stream(device), self._torch.Stream(device)

    def stream(self, chunks: Sequence[States]) -> Iterator[States]:
        """Yield each chunk on the device, in turn. What the caller writes to it is copied back to the host.

        Meanwhile the next chunk is copied in and the last one out. At the end the current stream waits for the copies;
        the host does not, see `wait`.
        """
        current = self._torch.current_stream(self._device)
        buffers = cycle([StagingBuffer(self._allocate(chunks)) for _ in range(NUM_STAGING_BUFFERS)])
        self._in_stream.wait_stream(current)  # earlier users of this memory are done
        ready: tuple[States, StagingBuffer] | None = None
        for chunk in [*chunks, None]:
            following = None if chunk is None else (chunk, next(buffers))
            if following is not None:
                self._copy_in(*following)
            if ready is not None:
                host, buffer = ready
                current.wait_event(buffer.copied_in)
                yield buffer.states
                self._out_stream.wait_stream(current)
                with self._torch.stream(self._out_stream):
                    for key, target in host.items():
                        target.copy_(buffer.states[key], non_blocking=True)
                    buffer.copied_out = self._out_stream.record_event()
            ready = following
        current.wait_stream(self._out_stream)  # so that the buffers' memory can be reused after it

    def wait(self) -> None:
        """Wait until the host has all states of the last `stream`."""
        self._torch.synchronize(self._device)

    def _copy_in(self, chunk: States, buffer: StagingBuffer) -> None:
        with self._torch.stream(self._in_stream):
            if buffer.copied_out is not None:
                self._in_stream.wait_event(buffer.copied_out)
            flat = {key: buffer.memory[key, host.dtype][: host.numel()] for key, host in chunk.items()}
            buffer.states = {key: flat[key].view(host.shape) for key, host in chunk.items()}
            for key, host in chunk.items():
                buffer.states[key].copy_(host, non_blocking=True)
            buffer.copied_in = self._in_stream.record_event()

    def _allocate(self, chunks: Sequence[States]) -> dict[BufferKey, Tensor]:
        """Return device memory for the largest chunk of each state."""
        sizes: dict[BufferKey, int] = {}
        for key, host in (item for chunk in chunks for item in chunk.items()):
            sizes[key, host.dtype] = max(sizes.get((key, host.dtype), 0), host.numel())
        return {key: torch.empty(size, dtype=key[1], device=self._device) for key, size in sizes.items()}


READ_AHEAD = 2  # chunks
NUM_SLOTS = 4  # two chunks are read, one is updated, one is written
NUM_DEVICE_BUFFERS = 3  # one chunk is copied in, one is updated, one is copied out


@dataclass(slots=True)
class DiskSlot:
    """Host memory for one chunk: what is being read into it, and what is being written from it."""

    memory: Tensor
    reads: list[Future[None]] = field(default_factory=list)
    writes: list[Future[None]] = field(default_factory=list)


@dataclass(slots=True)
class DeviceBuffer:
    """Device memory for one chunk, and the event that marks the end of its last copy to the host."""

    memory: Tensor
    copied_out: Any = None


@dataclass(frozen=True, slots=True)
class PlacedState:
    """A state of a chunk that is on disk: its store, its part of the file, and its bytes in a slot."""

    key: str
    store: DiskStore
    tensor: Tensor
    start: int

    def bytes_in(self, memory: Tensor) -> Tensor:
        return memory[self.start : self.start + padded(self.tensor.nbytes)]

    def view_in(self, memory: Tensor) -> Tensor:
        flat = memory[self.start : self.start + self.tensor.nbytes].view(self.tensor.dtype)
        return flat.view(self.tensor.shape)


class DiskStream:
    """Streams chunks of states from their files to the device and back.

    Two chunks are read while one is updated and those before it are written. On a GPU the host memory is pinned, and
    copies run on their own streams; on a CPU the update works in the slots themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, DEVICE_TRAITS[device.type].has_own_memory
        self._slots: list[DiskSlot] = []
        if self._on_gpu:
            self._torch = torch.get_device_module(device)
            self._in_stream, self._out_stream = self._torch.Stream(device), self._torch.Stream(device)

    def stream(self, chunks: Sequence[States]) -> Iterator[States]:
        """Yield the states of each chunk in turn, on the device. What the caller writes to them goes back to disk.

        Returns before all writes have ended, see `wait`. States that are not on disk are yielded as they are.
        """
        self.wait()
        placed = [_placed(chunk) for chunk in chunks]
        self._allocate(max((_size(each) for each in placed), default=0))
        buffers = [DeviceBuffer(torch.empty_like(self._slots[0].memory, device=self._device))
                   for _ in range(NUM_DEVICE_BUFFERS)] if self._on_gpu else []  # fmt: skip
        if self._on_gpu:
            self._in_stream.wait_stream(self._torch.current_stream(self._device))  # earlier users of this memory
        for number in range(len(chunks) + READ_AHEAD):
            if number < len(chunks):
                self._read(self._slots[number % NUM_SLOTS], placed[number])
            if (ready := number - READ_AHEAD) < 0:
                continue
            slot = self._slots[ready % NUM_SLOTS]
            _wait(slot.reads)
            if self._on_gpu:
                yield from self._update_on_gpu(chunks[ready], placed[ready], slot, buffers[ready % NUM_DEVICE_BUFFERS])
            else:
                yield chunks[ready] | {each.key: each.view_in(slot.memory) for each in placed[ready]}
                self._write(slot, placed[ready], None)
        if self._on_gpu:
            self._torch.current_stream(self._device).wait_stream(self._out_stream)  # so that buffers can be reused

    def wait(self) -> None:
        """Wait until all states are on disk. Raises OSError if one could not be written."""
        for slot in self._slots:
            _wait(slot.writes)

    def _update_on_gpu(
        self, chunk: States, placed: Sequence[PlacedState], slot: DiskSlot, buffer: DeviceBuffer
    ) -> Iterator[States]:
        current = self._torch.current_stream(self._device)
        with self._torch.stream(self._in_stream):
            if buffer.copied_out is not None:
                self._in_stream.wait_event(buffer.copied_out)
            for each in placed:
                each.bytes_in(buffer.memory).copy_(each.bytes_in(slot.memory), non_blocking=True)
        current.wait_stream(self._in_stream)
        yield chunk | {each.key: each.view_in(buffer.memory) for each in placed}
        self._out_stream.wait_stream(current)
        with self._torch.stream(self._out_stream):
            for each in placed:
                each.bytes_in(slot.memory).copy_(each.bytes_in(buffer.memory), non_blocking=True)
            buffer.copied_out = self._out_stream.record_event()
        self._write(slot, placed, buffer.copied_out)

    def _read(self, slot: DiskSlot, placed: Sequence[PlacedState]) -> None:
        """Start to read a chunk, once the slot's last chunk has been written."""
        after = tuple(slot.writes)
        slot.reads = [
            future for each in placed for future in each.store.read(each.tensor, each.bytes_in(slot.memory), after)
        ]

    def _write(self, slot: DiskSlot, placed: Sequence[PlacedState], after: Any) -> None:
        if placed:  # otherwise the slot still has the writes of an earlier chunk, which the next one waits for
            slot.writes = [
                future for each in placed for future in each.store.write(each.tensor, each.bytes_in(slot.memory), after)
            ]

    def _allocate(self, num_bytes: int) -> None:
        if not self._slots or len(self._slots[0].memory) < num_bytes:
            self._slots = [DiskSlot(aligned_buffer(num_bytes, pinned=self._on_gpu)) for _ in range(NUM_SLOTS)]


def _placed(chunk: States) -> list[PlacedState]:
    """Return the states of a chunk that are on disk, one after another in a slot."""
    found: list[PlacedState] = []
    for key, tensor in chunk.items():
        if (store := store_of(tensor)) is not None:
            found.append(PlacedState(key, store, tensor, _size(found)))
    return found


def _size(placed: Sequence[PlacedState]) -> int:
    return placed[-1].start + padded(placed[-1].tensor.nbytes) if placed else 0


def _wait(futures: list[Future[None]]) -> None:
    for each in futures:
        each.result()
    futures.clear()
