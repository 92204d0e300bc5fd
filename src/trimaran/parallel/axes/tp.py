"""Tensor parallelism: each rank holds a shard of every matrix. The network's `tensor_plan` names the styles."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trimaran.core import Plan
from trimaran.models import matches_module
from trimaran.nets import Network, tower_of
from trimaran.nets.absent_modules import AbsentModule
from trimaran.nets.adapters.lora_linear import DOWN, MAGNITUDE, UP, LoraLinear, is_adapter_parameter
from trimaran.nets.decoder.attention import WideRMSNorm
from trimaran.nets.local_shards import local_for_compute
from trimaran.parallel.axes.sharded_layers import (
    KINDS,
    ForeignColumns,
    ForeignExperts,
    ForeignReplica,
    ForeignRows,
    computes_with_shards,
    distribute,
    sharded,
)
from trimaran.parallel.comm.tensor_collectives import gather_sequence, reduce_gradient, reduce_sum, reduce_to_sequence
from trimaran.parallel.mesh import RankMesh, tp_replicated_towers

Change = Callable[[Tensor, DeviceMesh], Tensor]

# The placement of an adapter's parameters, by that of the layer's weight. All others are replicated.
ADAPTER_PLACEMENTS: dict[tuple[Placement, str], Placement] = {
    (Shard(0), UP): Shard(0),
    (Shard(0), MAGNITUDE): Shard(0),
    (Shard(1), DOWN): Shard(1),
}


def apply_tp(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Shard the modules that the network's plan names, except in towers with tp 1. Names and ties do not change."""
    if ranks.degrees.tp > 1:
        shard_modules(network.module, ranks.axes["tp"], tensor_styles(network, plan, ranks))


def shard_modules(module: nn.Module, mesh: DeviceMesh, patterns: Mapping[str, str]) -> None:
    """Shard the modules whose names match `patterns` by the style of each. Parameter names and ties do not change."""
    first: dict[int, str] = {}  # the first name of each parameter
    names = [(name, first.setdefault(id(each), name)) for name, each in module.named_parameters(remove_duplicate=False)]
    frozen = [name for name, each in module.named_parameters() if not each.requires_grad]
    for name, each in list(module.named_modules()):
        if isinstance(each, AbsentModule):  # of another pipeline stage
            continue
        for pattern, style in patterns.items():
            if matches_module(name, pattern):
                adapter = take_adapter(each) if isinstance(each, LoraLinear) else {}
                parallelize_module(each, mesh, STYLES[style](), src_data_rank=None)
                shard_adapter(each, mesh, adapter)
    for name, tied in names:
        if name != tied:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, module.get_parameter(tied))
    for name in frozen:  # some of torch's styles create new parameters, which require gradients
        module.get_parameter(name).requires_grad_(False)


def tensor_styles(network: Network, plan: Plan, ranks: RankMesh) -> dict[str, str]:
    """Return the style of each module name pattern in sharded towers, without experts that `apply_ep` spreads."""
    replicated = tp_replicated_towers(network, plan)
    styles = network.tensor_plan(ranks.degrees.tp)
    if ranks.degrees.ep > 1:
        styles = {name: style for name, style in styles.items() if style != "foreign-experts"}
    return {name: style for name, style in styles.items() if tower_of(name, network.towers) not in replicated}


def take_adapter(layer: LoraLinear) -> dict[str, nn.Parameter]:
    """Remove the adapter's parameters from a layer and return them: torch's styles know only a weight and a bias."""
    adapter = {name: each for name, each in layer.named_parameters(recurse=False) if is_adapter_parameter(name)}
    for name in adapter:
        delattr(layer, name)
    return adapter


def shard_adapter(layer: nn.Module, mesh: DeviceMesh, adapter: Mapping[str, nn.Parameter]) -> None:
    """Give the parameters back to the layer, sharded to fit its weight: lora_B by outputs, lora_A by inputs."""
    for name, each in adapter.items():
        assert isinstance(layer.weight, DTensor)
        placement = ADAPTER_PLACEMENTS.get((layer.weight.placements[0], name), Replicate())
        layer.register_parameter(name, sharded(each, mesh, placement))


class ShardedParameters(ParallelStyle):
    """Turns the module's own parameters into DTensors, replicated except for those in `placements`.

    `enter` converts the module's first input, `leave` its first output. A layer with a placement for its weight then
    computes with its shard, between plain tensors. A layer from elsewhere has torch's own style instead, `otherwise`.
    """

    def __init__(
        self,
        enter: Change | None = None,
        leave: Change | None = None,
        otherwise: Callable[[], ParallelStyle] | None = None,
        **placements: Placement,
    ) -> None:
        super().__init__()
        self._enter, self._leave, self._otherwise, self._placements = enter, leave, otherwise, placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if "weight" in self._placements and type(module) in KINDS:
            module.__class__ = KINDS[type(module)]
        if "weight" in self._placements and not computes_with_shards(module):  # a subclass with its own forward
            assert self._otherwise is not None, f"{type(module).__name__} is no layer of our own networks"
            style = self._otherwise()
            style.src_data_rank = None  # as `parallelize_module` sets it: every rank has the same values, or none
            return style._apply(module, device_mesh)
        distribute(module, device_mesh, **self._placements)
        if self._enter is not None:
            module.register_forward_pre_hook(lambda _, inputs: _with_first(inputs, self._enter, device_mesh))
        if self._leave is not None:
            module.register_forward_hook(lambda _, __, outputs: _with_first(outputs, self._leave, device_mesh))
        return module


class ReducedOutput(ShardedParameters):
    """Shards a linear layer by its inputs, and adds the bias to the sum, or with `sequence` to the rank's tokens."""

    def __init__(self, *, sequence: bool = False) -> None:
        otherwise = None if sequence else partial(RowwiseCopied, output_layouts=Replicate())
        super().__init__(None, reduce_to_sequence if sequence else reduce_sum, otherwise, weight=Shard(1))
        self._is_partial = sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        if isinstance(module, nn.Linear) and module.bias is not None and computes_with_shards(module):
            local = partial(local_for_compute, gradient_is_partial=self._is_partial)
            module.register_forward_hook(lambda linear, _, out: out + local(linear.bias).to(out.dtype))
        return module


class ShardedWideNorm(ParallelStyle):
    """Shards a norm over all heads as the heads are; the mean of squares is that of all ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        is_wide = isinstance(module, WideRMSNorm)
        distribute(module, device_mesh, **({"weight": Shard(0)} if is_wide else {}))
        if is_wide:  # every rank uses the sum for its own heads, so that its gradient is a sum over the ranks, too
            module.total = lambda squares: reduce_gradient(reduce_sum(squares, device_mesh), device_mesh)
        return module


class ScatterRows(ParallelStyle):
    """For a module that writes rows (such as image embeddings) into a sequence-sharded stream.

    Its inputs are the stream, the rows (replicated), and the row number of each position of the full sequence. The
    gradient of the rows is partial on each rank and is all-reduced.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, size = device_mesh.get_local_rank(), device_mesh.size()

        def enter(_: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            stream, rows, slots = inputs
            local_slots = slots.flatten().chunk(size)[rank].view(slots.shape[0], -1)
            return stream, reduce_gradient(rows, device_mesh), local_slots

        module.register_forward_pre_hook(enter)
        return module


class RowwiseCopied(RowwiseParallel):
    """torch's own style, with a copy of the output: of a view FSDP warns, and a compiled block loses its backward."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, __, out: out.clone())
        return module


class ShardedLogits(ShardedParameters):
    """Shards a head by its outputs. The logits are a DTensor, so that the loss knows which columns a rank has."""

    def __init__(self, enter: Change) -> None:
        otherwise = partial(ColwiseParallel, use_local_output=False)
        super().__init__(enter, None, otherwise, weight=Shard(0), bias=Shard(0))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        if computes_with_shards(module):
            module.register_forward_hook(partial(self._as_dtensor, device_mesh))
        return module

    def _as_dtensor(self, mesh: DeviceMesh, module: nn.Linear, _: Any, out: Tensor) -> Tensor:
        shape = torch.Size((*out.shape[:-1], module.out_features))
        stride = torch.empty(shape, device="meta").stride()  # ranks may hold unequal parts of a vocabulary
        placements = (Shard(out.ndim - 1),)
        return DTensor.from_local(out, mesh, placements, run_check=False, shape=shape, stride=stride)


def _with_first(values: Any, change: Change | None, mesh: DeviceMesh) -> Any:
    assert change is not None
    if isinstance(values, tuple):
        return (change(values[0], mesh), *values[1:])
    return change(values, mesh)


def _from_local(placement: Placement) -> Change:
    return lambda x, mesh: DTensor.from_local(x, mesh, (placement,), run_check=False)


def _to_local(x: Tensor, mesh: DeviceMesh) -> Tensor:
    assert isinstance(x, DTensor)
    return x.to_local()


# The styles of modules that gather their first input, a sequence shard, before they compute.
GATHERING_STYLES = frozenset({"gather-sequence", "sequence-to-logits", "moe"})
# The styles of a network's tensor plan. Modules exchange plain tensors, which are replicated unless the name says
# otherwise: `sequence` is a sequence shard, `colwise` a column shard, `partial` a partial sum. A `partial` style takes
# an input whose gradient is a partial sum.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": partial(ShardedParameters, reduce_gradient, None, ColwiseParallel, weight=Shard(0), bias=Shard(0)),
    "rowwise": ReducedOutput,
    "rowwise-to-sequence": partial(ReducedOutput, sequence=True),
    "embedding": partial(
        ShardedParameters, None, reduce_sum, partial(RowwiseCopied, input_layouts=Replicate()), weight=Shard(0)
    ),
    "embedding-to-sequence": partial(ShardedParameters, None, reduce_to_sequence, weight=Shard(0)),
    "colwise-logits": partial(ShardedLogits, reduce_gradient),
    "sequence-to-logits": partial(ShardedLogits, gather_sequence),
    "gather-sequence": partial(ShardedParameters, gather_sequence, sinks=Shard(0)),
    "sinks": partial(ShardedParameters, sinks=Shard(0)),
    "head-norm": ShardedWideNorm,
    "heads": partial(ShardedParameters, _from_local(Shard(2)), _to_local),
    "replicated": partial(ShardedParameters, _from_local(Replicate()), _to_local),
    "parameters": ShardedParameters,
    "scatter-rows": ScatterRows,
    "moe": partial(ShardedParameters, gather_sequence, reduce_to_sequence),
    "partial-to-sum": partial(ShardedParameters, None, reduce_sum),
    "partial-colwise": partial(ShardedParameters, weight=Shard(0), bias=Shard(0)),
    "partial-rowwise": partial(ShardedParameters, weight=Shard(1)),
    "partial-replicated": partial(ShardedParameters, weight=Replicate()),
    "foreign-colwise": ForeignColumns,
    "foreign-colwise-gathered": partial(ForeignColumns, gathers=True),
    "foreign-rowwise": ForeignRows,
    "foreign-rowwise-taken": partial(ForeignRows, takes=True),
    "foreign-replicated": ForeignReplica,
    "foreign-experts": ForeignExperts,
}
