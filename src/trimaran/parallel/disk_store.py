"""Tensors in a file on a local disk, past the page cache, and the weights that FSDP reads from one."""

import errno
import mmap
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from trimaran.core import DEVICE_TRAITS, Bytes
from trimaran.parallel.tensor_shards import STORES, goes_to_disk
from trimaran.runs import no_room

ALIGNMENT = 4096  # of addresses, file offsets and sizes: what direct I/O needs on every disk
NUM_THREADS = 16  # requests of a rank at a time: a disk needs many for its full bandwidth
MAX_REQUEST_BYTES = 8 << 20
NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)


class FileMapping(mmap.mmap):
    """The mapping of a whole file, and its store."""

    store: "DiskStore"


class DiskStore:
    """A file of `num_bytes` whose parts are tensors.

    A tensor of `allocate` is a mapping of its part of the file. Whoever reads or writes it as a tensor goes through the
    page cache, which the kernel keeps consistent with the direct reads and writes of `read` and `write`, as long as the
    two do not overlap in time. Training uses the latter, and everything else (initial weights, checkpoints) the former.
    """

    def __init__(self, folder: Path, num_bytes: int, *, write_at: Callable[..., int] = os.pwritev) -> None:
        self._size, self._write_at = max(ALIGNMENT, num_bytes), write_at
        # A file without a name. Not every disk has direct I/O, past the page cache.
        flags, self.is_direct = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, True
        try:
            self._descriptor = os.open(folder, flags | os.O_DIRECT, mode=0o600)
        except OSError as error:
            if error.errno not in NO_DIRECT_IO:
                raise
            self._descriptor, self.is_direct = os.open(folder, flags, mode=0o600), False
        try:
            os.posix_fallocate(self._descriptor, 0, self._size)
        except OSError as error:
            os.close(self._descriptor)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise no_room(str(folder), Bytes(num_bytes), Bytes(shutil.disk_usage(folder).free)) from None
        self._map = FileMapping(self._descriptor, self._size)
        self._map.store = self  # lives as long as its tensors, which refer to the mapping
        self._start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._used = 0
        self._pool = _pool_of(os.getpid())
        STORES.add(self)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor of zeros in the file."""
        start, count = self._used, prod(shape)
        self._used += padded(count * dtype.itemsize)
        assert self._used <= self._size, "the store is too small for its tensors"
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(*shape)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor, or what it is a view of, is in this file."""
        return tensor.is_cpu and 0 <= tensor.data_ptr() - self._start < self._size

    def read(self, source: Tensor, target: Tensor, after: Sequence[object] = ()) -> list[Future[None]]:
        """Start to read a tensor of this store into the bytes of `target`, after these futures and CUDA events."""
        return [
            self._pool.submit(self._transfer, os.preadv, offset, part, after) for offset, part in _parts(
                self._offset(source), target[: padded(source.nbytes)])
        ]  # fmt: skip

    def write(self, target: Tensor, source: Tensor, after: object = None) -> list[Future[None]]:
        """Start to write the bytes of `source` to a tensor of this store, once the CUDA event `after` has happened."""
        return [
            self._pool.submit(self._transfer, self._write_at, offset, part, () if after is None else (after,))
            for offset, part in _parts(self._offset(target), source[: padded(target.nbytes)])
        ]

    def release(self) -> None:
        """Write back what was written to the tensors as such, and free the memory that their pages take."""
        self._map.flush()
        self._map.madvise(mmap.MADV_DONTNEED)
        with suppress(OSError):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _offset(self, tensor: Tensor) -> int:
        offset = tensor.data_ptr() - self._start
        assert tensor.is_contiguous(), "only whole blocks are read and written"
        assert offset % ALIGNMENT == 0, "only whole blocks are read and written"
        return offset

    def _transfer(self, move: object, offset: int, part: Tensor, after: Sequence[object]) -> None:
        """Read or write all bytes of `part`. What it waits for was started before it, so that the pool never stops."""
        for each in after:
            each.result() if isinstance(each, Future) else each.synchronize()  # pyrefly: ignore[missing-attribute]
        view, done = part.numpy().data, 0
        while done < len(view):
            moved = move(self._descriptor, [view[done:]], offset + done)  # pyrefly: ignore[not-callable]
            if not moved:
                raise OSError(errno.EIO, "the file for offloaded tensors is shorter than it was")
            done += moved

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            os.close(self._descriptor)


@cache
def _pool_of(process: int) -> ThreadPoolExecutor:
    """Return the threads that all stores of a process share. A forked process does not inherit its parent's."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="trimaran-disk")


def padded(num_bytes: int) -> int:
    """Return the bytes that a tensor takes in the file."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(num_bytes: int, *, pinned: bool) -> Tensor:
    """Return host memory for direct I/O, as bytes."""
    memory = torch.empty(padded(num_bytes) + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + padded(num_bytes)]


def _parts(offset: int, memory: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, len(memory), MAX_REQUEST_BYTES):
        yield offset + start, memory[start : start + MAX_REQUEST_BYTES]


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
        if self.store is None:
            self.store = DiskStore(self._folder, self._num_bytes)
        return self.store.allocate(shape, dtype)

    def load(self, shard: Tensor, following: Sequence[Tensor] = ()) -> Tensor:
        """Return a flat shard on the device, copied on the current stream, and start to read the `following` ones."""
        values, accelerator = torch.empty_like(shard, device=self._device), torch.get_device_module(self._device)
        target = values.view(torch.uint8)
        if not self._reading or self._reading[0][0].data_ptr() != shard.data_ptr():  # another order than expected
            self._reading.clear()
            self._waiting = deque(
                part for each in (shard, *following) for part in each.view(torch.uint8).split(self._slot_bytes)
            )
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
        number = next(number for number, each in enumerate(self.unit) if each is self)
        following = [each._sharded_param_data for each in self.unit[number + 1 :]]
        values = self.disk.load(data, [each for each in following if store.holds(each)])
        return [values if self.param_dtype is None else values.to(self.param_dtype)]


def put_on_disk(units: Sequence[Sequence[FSDPParam]], folder: Path, device: torch.device) -> None:
    """Make FSDP keep these shards, without values yet, in one file. The parameters of a unit are gathered together."""
    disk = DiskWeights(folder, device)
    for unit in units:
        for each in unit:
            assert each._sharded_param_data.is_meta, "sharded parameters have values already"
            size = each._sharded_param_data.nbytes
            if goes_to_disk(size):
                disk.reserve(size)
            each.__class__ = DiskParameter
            each.disk, each.unit = disk, unit  # pyrefly: ignore[missing-attribute]
