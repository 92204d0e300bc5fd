"""Tensor parallelism: each rank holds a shard of every matrix. The network's `tensor_plan` names the styles."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trimaran.core import Plan
from trimaran.models import matches_module
from trimaran.nets import Network
from trimaran.nets.adapters.lora_linear import DOWN, MAGNITUDE, UP, LoraLinear, is_adapter_parameter
from trimaran.nets.tower_names import tower_of
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.tower_plan import tp_replicated_towers

Change = Callable[[Tensor, DeviceMesh], Tensor]

# The placement of an adapter's parameters, by that of the layer's weight. All others are replicated.
ADAPTER_PLACEMENTS: dict[tuple[Placement, str], Placement] = {
    (Shard(0), UP): Shard(0),
    (Shard(0), MAGNITUDE): Shard(0),
    (Shard(1), DOWN): Shard(1),
}

# Before torch 2.12, `from_local` always returns the gradient in the placement of the input.
TAKES_GRADIENT_PLACEMENTS = "grad_placements" in inspect.signature(DTensor.from_local).parameters


def apply_tp(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Shard the modules that the network's plan names. Parameter names and ties do not change.

    A tower with tp 1 keeps its full weights on every rank.
    """
    if ranks.degrees.tp == 1:
        return
    module, mesh = network.module, ranks.axes["tp"]
    replicated = tp_replicated_towers(network, plan)
    patterns = {
        pattern: style
        for pattern, style in network.tensor_plan(ranks.degrees.tp).items()
        if tower_of(pattern, network.towers) not in replicated
    }
    tied, frozen = _tied_names(module), [name for name, each in module.named_parameters() if not each.requires_grad]
    for name, each in list(module.named_modules()):
        for pattern, style in patterns.items():
            if matches_module(name, pattern):
                adapter = take_adapter(each) if isinstance(each, LoraLinear) else {}
                parallelize_module(each, mesh, STYLES[style](), src_data_rank=None)
                shard_adapter(each, mesh, adapter)
                if plan.compile and style.startswith("embedding"):
                    # A compiled block would unwrap the AsyncCollectiveTensor and lose its backward.
                    each.register_forward_hook(lambda _, __, out: out.clone())
    for name, first in tied.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, module.get_parameter(first))
    for name in frozen:  # some of torch's styles create new parameters, which require gradients
        module.get_parameter(name).requires_grad_(False)


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
        local = distribute_tensor(each, mesh, [placement], src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(local, requires_grad=each.requires_grad))


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each tied parameter by its other names."""
    first: dict[int, str] = {}
    names = module.named_parameters(remove_duplicate=False)
    pairs = [(name, first.setdefault(id(each), name)) for name, each in names]
    return {name: owner for name, owner in pairs if name != owner}


class DTensorParameters(ParallelStyle):
    """Turns the module's own parameters into DTensors, replicated except for those in `placements`.

    `enter` converts the module's first input, `leave` its first output.
    """

    def __init__(self, enter: Change | None = None, leave: Change | None = None, **placements: Placement) -> None:
        super().__init__()
        self._enter, self._leave, self._placements = enter, leave, placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for leaf, each in list(module.named_parameters(recurse=False)):
            placement = self._placements.get(leaf, Replicate())
            local = distribute_tensor(each, device_mesh, [placement], src_data_rank=None)
            module.register_parameter(leaf, nn.Parameter(local, requires_grad=each.requires_grad))
        if self._enter is not None:
            module.register_forward_pre_hook(lambda _, inputs: _with_first(inputs, self._enter, device_mesh))
        if self._leave is not None:
            module.register_forward_hook(lambda _, __, outputs: _with_first(outputs, self._leave, device_mesh))
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
            rows = _to_local_partial_gradient(_from_local(Replicate())(rows, device_mesh), device_mesh)
            return stream, rows, slots.chunk(size, dim=1)[rank]

        module.register_forward_pre_hook(enter)
        return module


class RowwiseCopied(RowwiseParallel):
    """Rowwise for the last module of a block. Copies its output, because FSDP warns if a block returns a view."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, __, out: out.clone())
        return module


def _with_first(values: Any, change: Change | None, mesh: DeviceMesh) -> Any:
    assert change is not None
    if isinstance(values, tuple):
        return (change(values[0], mesh), *values[1:])
    return change(values, mesh)


def _from_local(placement: Placement) -> Change:
    """Return a conversion from a local tensor to a DTensor."""
    return lambda x, mesh: DTensor.from_local(x, mesh, (placement,), run_check=False)


def _from_local_partial_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a replicated DTensor from a local tensor whose gradient is partial.

    Without torch's argument for this, the gradient is all-reduced, and each rank takes an equal part of it.
    """
    if TAKES_GRADIENT_PLACEMENTS:
        return DTensor.from_local(x, mesh, (Replicate(),), run_check=False, grad_placements=(Partial(),))
    return DTensor.from_local(DivideGradient.apply(x, mesh.size()), mesh, (Replicate(),), run_check=False)


class DivideGradient(Function):
    """The identity, whose gradient is divided by `size`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient / ctx.size, None


def _to_local(x: Tensor, mesh: DeviceMesh) -> Tensor:
    assert isinstance(x, DTensor)
    return x.to_local()


def _to_local_partial_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the local tensor of a replicated DTensor whose gradient is partial."""
    assert isinstance(x, DTensor)
    return x.to_local(grad_placements=(Partial(),))


def _all_gather_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the full sequence, replicated, from the local shard."""
    return DTensor.from_local(x, mesh, (Shard(1),), run_check=False).redistribute(placements=(Replicate(),))


def _all_gather_sequence_partial_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the full sequence as a plain tensor whose gradient is partial."""
    return _to_local_partial_gradient(_all_gather_sequence(x, mesh), mesh)


def _reduce_scatter_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the local sequence shard of a partial tensor."""
    return DTensor.from_local(x, mesh, (Partial(),), run_check=False).redistribute(placements=(Shard(1),)).to_local()


# The styles of a network's tensor plan. Modules exchange plain tensors, which are replicated unless the name says
# otherwise: `sequence` is a sequence shard, `colwise` a column shard, `partial` a partial sum.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "rowwise-copied": RowwiseCopied,
    "rowwise-to-sequence": partial(RowwiseParallel, output_layouts=Shard(1)),
    "embedding": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding-to-sequence": partial(RowwiseParallel, input_layouts=Replicate(), output_layouts=Shard(1)),
    "colwise-logits": partial(ColwiseParallel, use_local_output=False),
    "sequence-to-logits": partial(ColwiseParallel, input_layouts=Shard(1), use_local_output=False),
    "sequence": partial(SequenceParallel, use_local_output=True),
    "gather-sequence": partial(DTensorParameters, _all_gather_sequence),
    "heads": partial(DTensorParameters, _from_local(Shard(2)), _to_local),
    "replicated": partial(DTensorParameters, _from_local(Replicate()), _to_local),
    "parameters": DTensorParameters,
    "scatter-rows": ScatterRows,
    "moe": partial(DTensorParameters, _all_gather_sequence_partial_gradient, _reduce_scatter_sequence),
    "partial-colwise": partial(DTensorParameters, _from_local_partial_gradient, _to_local, weight=Shard(0)),
    "partial-rowwise": partial(DTensorParameters, _from_local(Shard(-1)), _to_local, weight=Shard(1)),
    "partial-replicated": partial(DTensorParameters, _from_local_partial_gradient, _to_local_partial_gradient),
}
