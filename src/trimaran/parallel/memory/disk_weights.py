"""Sharded parameters in a file: FSDP reads the weights of a unit from disk whenever it gathers them."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Private in torch: what FSDP2 knows of one parameter.
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from trimaran.parallel.memory.disk_store import DiskStore, aligned_buffer, goes_to_disk, padded

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

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device, self._num_bytes = folder, device, 0
        self.store: DiskStore | None = None
        self._slots: list[ReadSlot] = []

    def reserve(self, num_bytes: int) -> None:
        """Count a shard that will be allocated, before the first one is."""
        assert self.store is None
        self._num_bytes += padded(num_bytes)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a shard in the file."""
        if self.store is None:
            self.store = DiskStore(self._folder, self._num_bytes)
        return self.store.allocate(shape, dtype)

    def load(self, shard: Tensor) -> Tensor:
        """Return the values of a flat shard on the device. Copies there are on the current stream."""
        assert self.store is not None
        if self._device.type == "cpu":
            buffer = aligned_buffer(shard.nbytes, pinned=False)
            for each in self.store.read(shard, buffer):
                each.result()
            return buffer[: shard.nbytes].view(shard.dtype)
        values = torch.empty(shard.nbytes, dtype=torch.uint8, device=self._device)
        self._slots = self._slots or [ReadSlot(aligned_buffer(SLOT_BYTES, pinned=True)) for _ in range(NUM_SLOTS)]
        sources, stream = shard.view(torch.uint8).split(SLOT_BYTES), torch.get_device_module(self._device)
        for number in range(len(sources) + READ_AHEAD):
            if number < len(sources):
                slot = self._slots[number % NUM_SLOTS]
                slot.reads = self.store.read(sources[number], slot.memory, slot.copied)
            if (ready := number - READ_AHEAD) >= 0 and ready < len(sources):
                slot, size = self._slots[ready % NUM_SLOTS], len(sources[ready])
                for each in slot.reads:
                    each.result()
                start = ready * SLOT_BYTES
                values[start : start + size].copy_(slot.memory[:size], non_blocking=True)
                slot.copied = (stream.current_stream(self._device).record_event(),)
        return values.view(shard.dtype)


class DiskParameter(FSDPParam):
    """FSDP's parameter whose shard is in a file. Small ones stay in host memory."""

    disk: DiskWeights

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
        super().reset_sharded_param()

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """The shard in the compute dtype, read from the file."""
        store, data = self.disk.store, self._sharded_param_data
        if self.sharded_state != ShardedState.SHARDED or store is None or not store.holds(data):
            return super().all_gather_inputs
        values = self.disk.load(data)
        return [values if self.param_dtype is None else values.to(self.param_dtype)]


def put_on_disk(parameters: Sequence[FSDPParam], folder: Path, device: torch.device) -> None:
    """Make FSDP keep the shards of these parameters in one file. They must not have values yet."""
    disk = DiskWeights(folder, device)
    for each in parameters:
        assert each._sharded_param_data.is_meta, "sharded parameters have values already"
        size = each._sharded_param_data.nbytes
        if goes_to_disk(size):
            disk.reserve(size)
        each.__class__ = DiskParameter
        each.disk = disk  # pyrefly: ignore[missing-attribute]
