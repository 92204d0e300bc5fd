"""What blocks keep for backward, held on the host until backward comes for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor

# A weak reference to a storage is the one name of it that no later storage can take. It has no public home.
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.parallel.mesh import RankMesh

# Smaller storages, in bytes, stay where they are. A CPU gains nothing from the copies: there they are only proved.
LEAST_BYTES = {"cuda": 2**20, "cpu": 2**10}


def apply_activation_offload(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Let each block send what it keeps for backward to the host while the next one computes, and fetch it in time.

    Parameter names do not change. With full recompute what goes is the block's input. What selective recompute keeps
    by operator stays on the device. Weights stay too: FSDP frees and gathers them again itself.
    """
    if plan.offload == "activations":
        device = ranks.axes.device_type
        copies = StreamCopies() if device == "cuda" else Copies()
        offload_blocks(network, Offload(copies, device=device, least_bytes=LEAST_BYTES[device]))


def offload_blocks(network: Network, offload: "Offload") -> None:
    """Let every call of a block run inside the offload. It changes the block's class, as FSDP2 does."""
    for number, block in enumerate(network.blocks):
        block.__class__ = _offloaded(type(block))
        block._offload, block._number = offload, number  # pyrefly: ignore[bad-argument-type]


class OffloadedBlock(nn.Module):
    """A block whose call, compiled or not, runs inside an offload: `forward` is what compile sees, and not this."""

    _offload: "Offload"
    _number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        with self._offload.of(self, self._number):
            return super().__call__(*args, **kwargs)


@cache
def _offloaded(block: type[nn.Module]) -> type[nn.Module]:
    return type(f"Offloaded{block.__name__}", (OffloadedBlock, block), {})


class Copies:
    """Copies inside one memory, over as soon as they are asked for."""

    def to_host(self, source: Tensor) -> tuple[Tensor, Any]:
        """Return the copy, and what `wait` must be told before the source's memory is given back."""
        return source.clone(), None

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        """Return the copy, and what `wait` must be told before it is read."""
        return host.clone(), None

    def wait(self, copied: Any) -> None:
        """Let nothing computed from now on overtake a copy."""


class StreamCopies(Copies):
    """Copies between a GPU and pinned memory, on a stream for each direction.

    Device memory belongs to the stream that computes. It waits for each copy before the memory is given back or read,
    so that memory is free at once for what is computed next, and never before the copy is over.
    """

    def __init__(self) -> None:
        self.outward, self.homeward = torch.cuda.Stream(), torch.cuda.Stream()

    def to_host(self, source: Tensor) -> tuple[Tensor, Any]:
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        return host, _copy(host, source, self.outward)

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        device = torch.empty(host.shape, dtype=host.dtype, device="cuda")
        return device, _copy(device, host, self.homeward)

    def wait(self, copied: Any) -> None:
        torch.cuda.current_stream().wait_event(copied)


def _copy(target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> Any:
    # The source may still be in the making, and the target's memory in its last use.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    return stream.record_event()


class Parcel:
    """One storage, as bytes. It lives as long as something in the graph needs it."""

    def __init__(self, storage: torch.UntypedStorage, copies: Copies) -> None:
        self.copies = copies
        self.here: Tensor | None = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.host, self.copied = copies.to_host(self.here)

    def leave(self) -> None:
        """Give the device memory back."""
        self.copies.wait(self.copied)
        self.here = None

    def fetch(self) -> None:
        """Begin to bring it back, unless it is there."""
        if self.here is None:
            self.here, self.copied = self.copies.to_device(self.host)

    def open(self) -> torch.UntypedStorage:
        """Return the storage, on the device and complete."""
        self.fetch()
        self.copies.wait(self.copied)
        assert self.here is not None
        return self.here.untyped_storage()

    def __del__(self) -> None:
        self.copies.wait(self.copied)  # a graph may be thrown away while its parcels travel


class OffloadedCall:
    """One call of a block: the parcels it sent, and the call before it in the same forward.

    Micro-batches overlap in a pipeline, so each forward has calls of its own and knows nothing of the others'.
    """

    def __init__(self, block: nn.Module, number: int, previous: "OffloadedCall | None") -> None:
        self.block, self.number, self.previous = block, number, previous
        self.parcels: list[ref[Parcel]] = []
        # Masks and rotations are the same in every block: one parcel serves them all.
        self.sent: dict[tuple[StorageWeakRef, int], ref[Parcel]] = {} if previous is None else previous.sent

    @cached_property
    def weights(self) -> set[StorageWeakRef]:
        """The storages of the block's parameters. Asked for inside the call, when sharded ones are whole."""
        tensors = [*self.block.parameters(), *self.block.buffers()]
        return {StorageWeakRef(each.untyped_storage()) for tensor in tensors for each in _plain_parts(tensor)}

    def leave(self) -> None:
        for parcel in self._alive():
            parcel.leave()

    def fetch(self) -> None:
        for parcel in reversed(self._alive()):  # backward needs the last first
            parcel.fetch()

    def _alive(self) -> list[Parcel]:
        return [parcel for each in self.parcels if (parcel := each()) is not None]


class Packed(NamedTuple):
    """A tensor in a parcel."""

    parcel: Parcel
    call: OffloadedCall
    dtype: torch.dtype
    size: Any
    stride: Any
    offset: Any


class Wrapped(NamedTuple):
    """A tensor that wraps others, such as a DTensor."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    size: Any
    stride: Any


class Offload:
    """The way to the host and back for the blocks of one network."""

    def __init__(self, copies: Copies, *, device: str, least_bytes: int) -> None:
        self.copies, self.device, self.least_bytes = copies, device, least_bytes
        self.latest: OffloadedCall | None = None

    @contextmanager
    def of(self, block: nn.Module, number: int) -> Iterator[None]:
        """Send what is saved for backward inside. At most two calls' worth of it is on the device at a time."""
        latest = self.latest
        call = OffloadedCall(block, number, latest if latest is not None and latest.number < number else None)
        with saved_tensors_hooks(partial(self._pack, call), self._unpack):
            yield
        # What the last call of a forward sent stays, since backward begins with it.
        if latest is not None:
            latest.leave()
        self.latest = call

    def _pack(self, call: OffloadedCall, tensor: Tensor) -> Tensor | Packed | Wrapped:
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()
        if _is_cast_weight(tensor):
            return tensor.detach()
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: getattr(tensor, name) for name in names}  # a DTensor's mesh is among them
            parts = {name: self._pack(call, each) if isinstance(each, Tensor) else each for name, each in inner.items()}
            return Wrapped(type(tensor), parts, context, tensor.size(), tensor.stride())
        # A kept output of its own node would keep the node alive, so what stays is detached.
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return tensor.detach()
        if tensor.device.type != self.device or tensor.untyped_storage().nbytes() < self.least_bytes:
            return tensor.detach()
        key = StorageWeakRef(tensor.untyped_storage())
        if key in call.weights:
            return tensor.detach()
        parcel = self._parcel(call, tensor, key)
        return Packed(parcel, call, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _parcel(self, call: OffloadedCall, tensor: Tensor, key: StorageWeakRef) -> Parcel:
        known = call.sent.get((key, tensor._version))
        parcel = None if known is None else known()
        if parcel is None:
            parcel = Parcel(tensor.untyped_storage(), self.copies)
            call.sent[key, tensor._version] = ref(parcel)
            call.parcels.append(ref(parcel))
        return parcel

    def _unpack(self, packed: Any) -> Any:
        if isinstance(packed, Wrapped):
            parts = {name: self._unpack(part) for name, part in packed.parts.items()}
            return packed.kind.__tensor_unflatten__(parts, packed.context, packed.size, packed.stride)
        if not isinstance(packed, Packed):
            return packed
        packed.call.fetch()
        storage = packed.parcel.open()
        if packed.call.previous is not None:
            packed.call.previous.fetch()  # on its way while this block computes
        whole = torch.empty(0, dtype=packed.dtype, device=storage.device)
        return whole.set_(storage, packed.offset, packed.size, packed.stride)


def _plain_parts(tensor: Any) -> list[Tensor]:
    """Return the plain tensors that hold the memory of `tensor`."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _plain_parts(getattr(tensor, name))]
    return [tensor] if isinstance(tensor, Tensor) else []


def _is_cast_weight(tensor: Tensor) -> bool:
    """Return whether autocast, or a block itself, made `tensor` of a parameter: it is needed whole in every forward."""
    maker = (tensor if tensor._base is None else tensor._base).grad_fn
    if maker is None or maker.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(maker.next_functions[0][0], "variable", None), nn.Parameter)
