"""Tensor-parallel ranks save their part of a gathered input, not all of it, and gather it again in backward."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# A weak reference identifies a storage uniquely, unlike its address. It is private in torch.
from torch.multiprocessing.reductions import StorageWeakRef

from trimaran.core import Plan
from trimaran.models import matches_module
from trimaran.nets import Network
from trimaran.parallel.axes.tp import GATHERING_STYLES, tensor_styles
from trimaran.parallel.comm.axis_waits import AXIS_WAITS
from trimaran.parallel.comm.gradient_exchange import gather_single
from trimaran.parallel.memory.activation_offload import cast_origin
from trimaran.parallel.memory.recompute import recomputed_blocks, regather_in_compiled
from trimaran.parallel.mesh import RankMesh


def apply_regather(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Gather the inputs of attention, feed-forward and head again in backward. Parameter names do not change.

    Blocks that are recomputed do so already. A compiled block gets a policy for the compiler, which runs after this.
    """
    if not plan.comm.regather or ranks.degrees.tp == 1:
        return
    recomputed = {id(part) for _, block in recomputed_blocks(network, plan) for part in block.modules()}
    compiled = {id(part): block for block in network.blocks if plan.compile for part in block.modules()}
    styles = tensor_styles(network, plan, ranks)
    patterns = [pattern for pattern, style in styles.items() if style in GATHERING_STYLES]
    named = [(name, each) for name, each in network.module.named_modules() if id(each) not in recomputed]
    found = [each for name, each in named if any(matches_module(name, pattern) for pattern in patterns)]
    blocks = {id(block): block for each in found if (block := compiled.get(id(each))) is not None}
    regather_in_compiled(blocks.values(), ranks.axes["tp"].get_group().group_name)
    for each in found:
        if id(each) not in compiled:
            # Save the module's first input as a shard. This changes the module's class, like FSDP2.
            each.__class__ = _regathering(type(each))
            assert isinstance(each, RegatheringModule)
            each._gather_mesh, each._gathered_call = ranks.axes["tp"], None
            each.register_forward_pre_hook(_remember_gathered)  # after the hook that gathers


class RegatheringModule(nn.Module):
    """A module that gathers its first input in a forward pre-hook, and again in backward."""

    _gather_mesh: DeviceMesh
    _gathered_call: "GatheredCall | None"

    def __call__(self, shard: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(shard, *args, **kwargs)
        call = self._gathered_call = GatheredCall(shard, self._gather_mesh)
        try:
            with saved_tensors_hooks(call.pack, unpack):
                return super().__call__(shard, *args, **kwargs)
        finally:
            self._gathered_call = None
            # If nothing has saved the input, its shard is not needed either.
            call.gathered = call.shard = None


def _remember_gathered(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    assert isinstance(module, RegatheringModule)
    if (call := module._gathered_call) is not None:
        call.remember(inputs[0])


@cache
def _regathering(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Regathering{kind.__name__}", (RegatheringModule, kind), {})


class OtherTensor(NamedTuple):
    """A saved tensor that is not the gathered input, as the surrounding hooks packed it."""

    call: "GatheredCall"
    packed: Any


class GatheredView(NamedTuple):
    """A view of the gathered input, or of its cast to another dtype. `wrapper` makes it a DTensor."""

    call: "GatheredCall"
    dtype: torch.dtype
    size: Any
    stride: Any
    offset: Any
    wrapper: Any


class GatheredCall:
    """One call of a module: its input's shard, and during backward the input gathered from all shards.

    The first saved tensor that backward asks for starts the gather, so that it overlaps with the backward of the
    module's last matmul. The gathered input is freed after its last use. Should backward run again, as a split
    backward does, it is gathered again.
    """

    def __init__(self, shard: Tensor, mesh: DeviceMesh) -> None:
        self.group, self.ranks = mesh.get_group(), mesh.size()
        # Hooks do not nest by themselves: activation offload gets what is saved here, too.
        self.outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.shard: Tensor | None = shard  # in forward
        self.gathered: Tensor | None = None
        self.packed_shard: Any = None
        self.storage: StorageWeakRef | None = None
        self.num_views = self.num_used = self.num_passes = 0
        self.again: Tensor | None = None  # in backward
        self.work: Any = None

    def remember(self, gathered: Tensor) -> None:
        """Note the gathered input, whose views are not saved."""
        local = local_tensor(gathered)
        assert local.is_contiguous(), "views of the input are taken from one that is gathered again"
        assert local.storage_offset() == 0
        self.gathered, self.storage = gathered, StorageWeakRef(local.untyped_storage())

    def pack(self, tensor: Tensor) -> OtherTensor | GatheredView:
        """Return what is saved instead of `tensor`."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()
        local = local_tensor(tensor)
        if self.storage is None or not self._is_gathered(tensor, local):
            # Detached, because an output that its own node saves would keep the node alive.
            other = tensor if tensor.grad_fn is None else tensor.detach()
            return OtherTensor(self, self._pack_outside(other))
        if self.num_views == 0:
            assert self.shard is not None
            self.packed_shard = self._pack_outside(self.shard.detach())
        self.num_views += 1
        wrapper = None
        if isinstance(tensor, DTensor):
            wrapper = (tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride())
        return GatheredView(self, local.dtype, local.size(), local.stride(), local.storage_offset(), wrapper)

    def _is_gathered(self, tensor: Tensor, local: Tensor) -> bool:
        if StorageWeakRef(local.untyped_storage()) == self.storage:
            return True
        # Or it is the gathered tensor in another dtype, or a view of that.
        origin = None if self.gathered is None else self.gathered.grad_fn
        return origin is not None and cast_origin(tensor) is origin

    def _pack_outside(self, tensor: Tensor) -> Any:
        return tensor if self.outer is None else self.outer[0](tensor)

    def unpack_outside(self, packed: Any) -> Tensor:
        """Return the tensor that the surrounding hooks packed."""
        return packed if self.outer is None else self.outer[1](packed)

    def start(self) -> None:
        """Start to gather the input again, unless that is done or under way."""
        if self.work is not None or self.again is not None:
            return
        shard = self.unpack_outside(self.packed_shard).contiguous()
        self.again = shard.new_empty(self.ranks, *shard.shape)
        self.work = gather_single(self.again.flatten(0, 1), shard, group=self.group, async_op=True)

    def view(self, view: GatheredView) -> Tensor:
        """Return the local tensor of a view of the input."""
        self.start()
        assert self.again is not None
        if self.work is not None:
            with AXIS_WAITS.span("tp"):
                self.work.wait()
            shape = self.again.shape[1:]
            self.work, self.again = None, self.again.view(shape[0], -1, *shape[2:])
        whole = self.again
        self.num_used += 1
        if self.num_used == self.num_views:
            self.again, self.num_used, self.num_passes = None, 0, self.num_passes + 1
        return whole.to(view.dtype).as_strided(view.size, view.stride, view.offset)


def unpack(packed: OtherTensor | GatheredView) -> Tensor:
    call = packed.call
    if isinstance(packed, OtherTensor):
        if call.num_views > 0 and call.num_passes == 0:
            call.start()
        return call.unpack_outside(packed.packed)
    local = call.view(packed)
    if packed.wrapper is None:
        return local
    mesh, placements, size, stride = packed.wrapper
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, ready to use."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local
