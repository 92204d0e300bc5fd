"""Optimizer states on the host: streamed to the device for the update, and back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from trimaran.parallel.optimizer.moments import States

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
    """Copies states between host and device on its own CUDA streams, in both directions at once.

    On a CPU torch's placeholder streams are used: the same copies, one after another.
    """

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
            following = None if chunk is None else (chunk, self._copy_in(chunk, next(buffers)))
            if ready is not None:
                host, buffer = ready
                current.wait_event(buffer.copied_in)
                yield buffer.states
                self._out_stream.wait_stream(current)
                self._copy_out(host, buffer)
            ready = following
        current.wait_stream(self._out_stream)  # so that the buffers' memory can be reused after it

    def wait(self) -> None:
        """Wait until the host has all states of the last `stream`."""
        self._torch.synchronize(self._device)

    def _copy_in(self, chunk: States, buffer: StagingBuffer) -> StagingBuffer:
        with self._torch.stream(self._in_stream):
            if buffer.copied_out is not None:
                self._in_stream.wait_event(buffer.copied_out)
            flat = {key: buffer.memory[key, host.dtype][: host.numel()] for key, host in chunk.items()}
            buffer.states = {key: flat[key].view(host.shape) for key, host in chunk.items()}
            for key, host in chunk.items():
                buffer.states[key].copy_(host, non_blocking=True)
            buffer.copied_in = self._in_stream.record_event()
        return buffer

    def _copy_out(self, chunk: States, buffer: StagingBuffer) -> None:
        with self._torch.stream(self._out_stream):
            for key, host in chunk.items():
                host.copy_(buffer.states[key], non_blocking=True)
            buffer.copied_out = self._out_stream.record_event()

    def _allocate(self, chunks: Sequence[States]) -> dict[BufferKey, Tensor]:
        """Return device memory for the largest chunk of each state."""
        sizes: dict[BufferKey, int] = {}
        for key, host in (item for chunk in chunks for item in chunk.items()):
            sizes[key, host.dtype] = max(sizes.get((key, host.dtype), 0), host.numel())
        return {key: torch.empty(size, dtype=key[1], device=self._device) for key, size in sizes.items()}
