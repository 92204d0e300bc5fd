"""Activation offload: saved tensors of blocks are copied to the host and fetched back for backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor

# A weak reference identifies a storage uniquely, unlike its address. It is private in torch.
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trimaran.core import DEVICE_TRAITS, Plan
from trimaran.nets import LocalShard, Network
from trimaran.parallel.mesh import RankMesh

# Smaller storages stay on the device. On a CPU offload saves nothing; it runs there for tests.
MIN_OFFLOAD_BYTES = {"cuda": 2**20, "cpu": 2**10}
LOCAL_SHARD_NODE = f"{LocalShard.__name__}Backward"  # the autograd node of a weight that tensor parallelism shards


def apply_activation_offload(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Copy the saved tensors of each block to the host while the next block computes, and prefetch them for backward.

    Parameter names do not change. With full recompute only the block's input is offloaded. Outputs that selective
    recompute saves stay on the device. Weights stay too: FSDP reshards and unshards them.
    """
    if plan.offload == "activations":
        device = ranks.axes.device_type
        copies = StreamCopies() if DEVICE_TRAITS[device].runs_async else SynchronousCopies()
        offload_blocks(network, ActivationOffload(copies, device=device, min_bytes=MIN_OFFLOAD_BYTES[device]))


def offload_blocks(network: Network, offload: "ActivationOffload") -> None:
    """Run every call of a block inside the offload. Changes the block's class, like FSDP2."""
    for number, block in enumerate(network.blocks):
        block.__class__ = _offloaded(type(block))
        block._offload, block._number = offload, number  # pyrefly: ignore[bad-argument-type]


class OffloadedBlock(nn.Module):
    """A block whose `__call__` runs inside an offload. `compile` sees only `forward`."""

    _offload: "ActivationOffload"
    _number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        with self._offload.offload_call(self, self._number):
            return super().__call__(*args, **kwargs)


@cache
def _offloaded(block: type[nn.Module]) -> type[nn.Module]:
    return type(f"Offloaded{block.__name__}", (OffloadedBlock, block), {})


class SynchronousCopies:
    """Synchronous copies within the host memory."""

    def to_host(self, source: Tensor) -> tuple[Tensor, Any]:
        """Return the copy, and an event to `wait` for before the source's memory is freed."""
        return source.clone(), None

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        """Return the copy, and an event to `wait` for before it is read."""
        return host.clone(), None

    def wait(self, event: Any) -> None:
        """Make the compute stream wait for a copy."""


class StreamCopies(SynchronousCopies):
    """Asynchronous copies between a GPU and pinned memory, with one stream per direction.

    Device memory belongs to the compute stream, which waits for a copy before the memory is freed or read. So memory
    can be reused by the next kernel, but never before the copy is done.
    """

    def __init__(self) -> None:
        self.to_host_stream, self.to_device_stream = torch.cuda.Stream(), torch.cuda.Stream()

    def to_host(self, source: Tensor) -> tuple[Tensor, Any]:
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        return host, _copy(host, source, self.to_host_stream)

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        device = torch.empty(host.shape, dtype=host.dtype, device="cuda")
        return device, _copy(device, host, self.to_device_stream)

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream().wait_event(event)


def _copy(target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> Any:
    # The source may still be computed, and the target's memory may still be read.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    return stream.record_event()


class OffloadedStorage:
    """One storage as bytes. It lives as long as the autograd graph refers to it."""

    def __init__(self, storage: torch.UntypedStorage, copies: SynchronousCopies) -> None:
        self.copies = copies
        self.on_device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.host, self.copy_event = copies.to_host(self.on_device)

    def release(self) -> None:
        self.copies.wait(self.copy_event)
        self.on_device = None

    def prefetch(self) -> None:
        """Start the copy back to the device, unless it is there."""
        if self.on_device is None:
            self.on_device, self.copy_event = self.copies.to_device(self.host)

    def fetch(self) -> torch.UntypedStorage:
        """Return the storage on the device, ready to use."""
        self.prefetch()
        self.copies.wait(self.copy_event)
        assert self.on_device is not None
        return self.on_device.untyped_storage()

    def __del__(self) -> None:
        self.copies.wait(self.copy_event)  # a graph may be dropped while a copy is in flight


class OffloadedCall:
    """One call of a block: what it offloaded, and the call before it in the forward of the same micro-batch."""

    def __init__(self, block: nn.Module, number: int, previous: "OffloadedCall | None") -> None:
        self.block, self.number, self.previous = block, number, previous
        self.storages: list[ref[OffloadedStorage]] = []
        # Masks and rotary tables are shared by all blocks: they are offloaded once.
        self.offloaded: dict[tuple[StorageWeakRef, int], ref[OffloadedStorage]] = (
            {} if previous is None else previous.offloaded
        )

    @cached_property
    def weights(self) -> set[StorageWeakRef]:
        """The storages of the block's parameters and buffers. Read during the call, while they are unsharded."""
        tensors = [*self.block.parameters(), *self.block.buffers()]
        return {StorageWeakRef(each.untyped_storage()) for tensor in tensors for each in _plain_parts(tensor)}

    def release(self) -> None:
        for storage in self._alive():
            storage.release()

    def prefetch(self) -> None:
        for storage in reversed(self._alive()):  # backward needs the last one first
            storage.prefetch()

    def _alive(self) -> list[OffloadedStorage]:
        return [storage for each in self.storages if (storage := each()) is not None]


class PackedTensor(NamedTuple):
    """A view of an offloaded storage."""

    storage: OffloadedStorage
    call: OffloadedCall
    dtype: torch.dtype
    size: Any
    stride: Any
    offset: Any


class PackedSubclass(NamedTuple):
    """A tensor subclass that wraps others, such as a DTensor."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    size: Any
    stride: Any


class ActivationOffload:
    """Offloads the saved tensors of the blocks of one network."""

    def __init__(self, copies: SynchronousCopies, *, device: str, min_bytes: int) -> None:
        self.copies, self.device, self.min_bytes = copies, device, min_bytes
        self.latest: OffloadedCall | None = None

    @contextmanager
    def offload_call(self, block: nn.Module, number: int) -> Iterator[None]:
        """Offload tensors saved for backward inside. The saved tensors of at most two calls are on the device."""
        latest = self.latest
        call = OffloadedCall(block, number, latest if latest is not None and latest.number < number else None)
        with saved_tensors_hooks(partial(self._pack, call), self._unpack):
            yield
        # The last call of a forward keeps its tensors on the device, since backward starts with it.
        if latest is not None:
            latest.release()
        self.latest = call

    def _pack(self, call: OffloadedCall, tensor: Tensor) -> Tensor | PackedTensor | PackedSubclass:
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()
        source = cast_origin(tensor)
        if source is not None and source.name() == LOCAL_SHARD_NODE:
            source = source.next_functions[0][0]
        if isinstance(getattr(source, "variable", None), nn.Parameter):  # a weight that autocast or a block has cast
            return tensor.detach()
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: getattr(tensor, name) for name in names}  # includes a DTensor's mesh
            parts = {name: self._pack(call, each) if isinstance(each, Tensor) else each for name, each in inner.items()}
            return PackedSubclass(type(tensor), parts, context, tensor.size(), tensor.stride())
        # Tensors that stay are detached: an output saved by its own node would keep the node alive.
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return tensor.detach()
        if tensor.device.type != self.device or tensor.untyped_storage().nbytes() < self.min_bytes:
            return tensor.detach()
        key = StorageWeakRef(tensor.untyped_storage())
        if key in call.weights:
            return tensor.detach()
        reference = call.offloaded.get((key, tensor._version))
        storage = None if reference is None else reference()
        if storage is None:
            storage = OffloadedStorage(tensor.untyped_storage(), self.copies)
            call.offloaded[key, tensor._version] = ref(storage)
            call.storages.append(ref(storage))
        return PackedTensor(storage, call, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack(self, packed: Any) -> Any:
        if isinstance(packed, PackedSubclass):
            parts = {name: self._unpack(part) for name, part in packed.parts.items()}
            return packed.kind.__tensor_unflatten__(parts, packed.context, packed.size, packed.stride)
        if not isinstance(packed, PackedTensor):
            return packed
        packed.call.prefetch()
        storage = packed.storage.fetch()
        if packed.call.previous is not None:
            packed.call.previous.prefetch()  # overlaps with the backward of this block
        tensor = torch.empty(0, dtype=packed.dtype, device=storage.device)
        return tensor.set_(storage, packed.offset, packed.size, packed.stride)


def _plain_parts(tensor: Any) -> list[Tensor]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _plain_parts(getattr(tensor, name))]
    return [tensor] if isinstance(tensor, Tensor) else []


def cast_origin(tensor: Tensor) -> Any:
    """Return the autograd node of which `tensor`, or what it is a view of, is a cast; None if it is no cast."""
    node = (tensor if tensor._base is None else tensor._base).grad_fn
    return node.next_functions[0][0] if node is not None and node.name() == "ToCopyBackward0" else None
