"""Sharded parameters in a file: FSDP reads the weights of a unit from disk whenever it gathers them."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Private in torch: what FSDP2 knows of one parameter.
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from trimaran.core.traits import DEVICE_TRAITS
from trimaran.parallel.disk.disk_store import DiskStore, aligned_buffer, padded
from trimaran.parallel.disk.tensors_on_disk import goes_to_disk

SLOT_BYTES = 16 << 20
NUM_SLOTS, READ_AHEAD = 8, 6  # of pinned memory; the others are being copied to the device


@dataclass(slots=True)
class ReadSlot:
    """Pinned memory for a part of a weight, what is being read into it, and the end of its last copy to the device."""

    memory: Tensor
    reads: list[Future[None]] = field(default_factory=list)
    copied: tuple[Any, ...] = ()


class DiskWeights:
    """The file of a rank's shards, and the memory to read them through. The file is created with the first shard."""

    def __init__(self, folder: Path, device: torch.device, *, slot_bytes: int = SLOT_BYTES) -> None:
        self._folder, self._device, self._num_bytes, self._slot_bytes = folder, device, 0, slot_bytes
        self.store: DiskStore | None = None
        self._slots: list[ReadSlot] = []
        self._next_slot = 0
        self._reading: deque[tuple[Tensor, ReadSlot]] = deque()  # parts of shards, in order
        self._waiting: deque[Tensor] = deque()  # those that will be read next

    def reserve(self, num_bytes: int) -> None:
        """Count a shard that will be allocated, before the first one is."""
        assert self.store is None
        self._num_bytes += padded(num_bytes)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a shard in the file."""
        if self.store is None:
            self.store = DiskStore(self._folder, self._num_bytes)
        return self.store.allocate(shape, dtype)

    def load(self, shard: Tensor, following: Sequence[Tensor] = ()) -> Tensor:
        """Return the values of a flat shard on the device. Copies there are on the current stream.

        `following` are the shards that will be loaded next: the disk is never idle between them.
        """
        values, accelerator = torch.empty_like(shard, device=self._device), torch.get_device_module(self._device)
        target = values.view(torch.uint8)
        if not self._reading or self._reading[0][0].data_ptr() != shard.data_ptr():  # another order than expected
            self._reading.clear()
            self._waiting = deque(part for each in (shard, *following) for part in self._parts_of(each))
        for start in range(0, len(target), self._slot_bytes):
            self._read_ahead()
            source, slot = self._reading.popleft()
            for each in slot.reads:
                each.result()
            target[start : start + len(source)].copy_(slot.memory[: len(source)], non_blocking=True)
            event = accelerator.current_stream(self._device).record_event()  # None on a CPU, where nothing is pending
            slot.copied = () if event is None else (event,)
        self._read_ahead()
        return values

    def _read_ahead(self) -> None:
        """Start reads into the free slots."""
        assert self.store is not None
        if not self._slots:
            pinned = DEVICE_TRAITS[self._device.type].has_own_memory
            self._slots = [ReadSlot(aligned_buffer(self._slot_bytes, pinned=pinned)) for _ in range(NUM_SLOTS)]
        while self._waiting and len(self._reading) < READ_AHEAD:
            slot, self._next_slot = self._slots[self._next_slot], (self._next_slot + 1) % NUM_SLOTS
            for each in slot.reads:  # of another order
                each.result()
            source = self._waiting.popleft()
            slot.reads = self.store.read(source, slot.memory, slot.copied)
            self._reading.append((source, slot))

    def _parts_of(self, shard: Tensor) -> Sequence[Tensor]:
        return shard.view(torch.uint8).split(self._slot_bytes)


class DiskParameter(FSDPParam):
    """FSDP's parameter whose shard is in a file. Small ones stay in host memory."""

    disk: DiskWeights
    unit: Sequence[FSDPParam] = ()
    """All parameters that are gathered together, in this order."""

    def reset_sharded_param(self) -> None:
        """Move a shard that has just been given memory to the file. Its values are undefined until it is filled."""
        parameter = getattr(self._module_info.module, self._module_info.param_name)
        local, shape = parameter._local_tensor, self.padded_sharded_param_size
        is_new = not local.is_meta and not (self.disk.store is not None and self.disk.store.holds(local))
        if is_new and goes_to_disk(shape.numel() * local.element_size()):
            data = self.disk.allocate(shape, local.dtype)
            self._sharded_param_data = data.view(-1)
            dim = self.fsdp_placement.dim
            length = local.size(dim) if local.numel() else 0
            parameter._local_tensor = data.narrow(dim, 0, length)
        self.pin_memory = False  # a file cannot be pinned
        super().reset_sharded_param()
        # Gradients are copied to pinned memory, which is used again in every step: a copy to new pages takes 40 times
        # as long, and backward waits for it.
        self.pin_memory = self.offload_to_cpu and DEVICE_TRAITS[self.device.type].has_own_memory

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """The shard in the compute dtype, read from the file."""
        store, data = self.disk.store, self._sharded_param_data
        if self.sharded_state != ShardedState.SHARDED or store is None or not store.holds(data):
            return super().all_gather_inputs
        values = self.disk.load(data, [each for each in self._following() if store.holds(each)])
        return [values if self.param_dtype is None else values.to(self.param_dtype)]

    def _following(self) -> list[Tensor]:
        """Return the shards that are gathered after this one."""
        number = next(number for number, each in enumerate(self.unit) if each is self)
        return [each._sharded_param_data for each in self.unit[number + 1 :]]


def put_on_disk(units: Sequence[Sequence[FSDPParam]], folder: Path, device: torch.device) -> None:
    """Make FSDP keep the shards of these parameters in one file. They must not have values yet.

    The parameters of a unit are gathered together.
    """
    disk = DiskWeights(folder, device)
    for unit in units:
        for each in unit:
            assert each._sharded_param_data.is_meta, "sharded parameters have values already"
            size = each._sharded_param_data.nbytes
            if goes_to_disk(size):
                disk.reserve(size)
            each.__class__ = DiskParameter
            each.disk, each.unit = disk, unit  # pyrefly: ignore[missing-attribute]
