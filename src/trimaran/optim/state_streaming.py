"""Optimizer states that live on the host: brought to the device for the update, and taken back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from trimaran.optim.moments import States

Slot = tuple[str, torch.dtype]
RANK_MEMORIES = 3  # one load arrives, one is worked on, one leaves


@dataclass(slots=True)
class StagingBuffer:
    """Memory of the device for one load at a time, and the events between which the load is there."""

    memory: dict[Slot, Tensor]
    states: States = field(default_factory=dict)
    arrived: Any = None
    left: Any = None


class StateStream:
    """Carries states between host and device on streams of its own, in both directions at once.

    On a CPU the streams are torch's stand-ins for them: the same copies, one after another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._torch = device, torch.get_device_module(device)
        self._inward, self._outward = self._torch.Stream(device), self._torch.Stream(device)

    def cross(self, loads: Sequence[States]) -> Iterator[States]:
        """Yield each load on the device, in turn. What its taker makes of it is written back to the host.

        Meanwhile the next load arrives and the last one leaves. At the end the current stream waits for the copies;
        the host does not, see `wait`.
        """
        here = self._torch.current_stream(self._device)
        rank_memories = cycle([StagingBuffer(self._room(loads)) for _ in range(RANK_MEMORIES)])
        self._inward.wait_stream(here)  # what was in this memory before has been used
        waiting: tuple[States, StagingBuffer] | None = None
        for load in [*loads, None]:
            arriving = None if load is None else (load, self._bring(load, next(rank_memories)))
            if waiting is not None:
                host, rank_memory = waiting
                here.wait_event(rank_memory.arrived)
                yield rank_memory.states
                self._outward.wait_stream(here)
                self._take_back(host, rank_memory)
            waiting = arriving
        here.wait_stream(self._outward)  # so does whoever gets the memory of the rank memories next

    def wait(self) -> None:
        """Return when the host has all that the last crossing took back."""
        self._torch.synchronize(self._device)

    def _bring(self, load: States, rank_memory: StagingBuffer) -> StagingBuffer:
        with self._torch.stream(self._inward):
            if rank_memory.left is not None:
                self._inward.wait_event(rank_memory.left)
            rooms = {key: rank_memory.memory[key, host.dtype][: host.numel()] for key, host in load.items()}
            rank_memory.states = {key: rooms[key].view(host.shape) for key, host in load.items()}
            for key, host in load.items():
                rank_memory.states[key].copy_(host, non_blocking=True)
            rank_memory.arrived = self._inward.record_event()
        return rank_memory

    def _take_back(self, load: States, rank_memory: StagingBuffer) -> None:
        with self._torch.stream(self._outward):
            for key, host in load.items():
                host.copy_(rank_memory.states[key], non_blocking=True)
            rank_memory.left = self._outward.record_event()

    def _room(self, loads: Sequence[States]) -> dict[Slot, Tensor]:
        """Return memory for the largest of the loads, state by state."""
        sizes: dict[Slot, int] = {}
        for key, host in (item for load in loads for item in load.items()):
            sizes[key, host.dtype] = max(sizes.get((key, host.dtype), 0), host.numel())
        return {slot: torch.empty(size, dtype=slot[1], device=self._device) for slot, size in sizes.items()}
