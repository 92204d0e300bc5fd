"""Tensor parallelism: each rank holds a slice of every matrix, by a plan that the network brings along as data."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
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
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.tower_plan import tower_of, whole_towers

Change = Callable[[Tensor, DeviceMesh], Tensor]


def apply_tp(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Split the modules that the network's plan names. Parameter names and ties do not change.

    A tower that is to stay whole has its weights on every rank.
    """
    if ranks.degrees.tp == 1:
        return
    module, mesh = network.module, ranks.axes["tp"]
    whole = whole_towers(network, plan)
    patterns = {
        pattern: style
        for pattern, style in network.tensor_plan(ranks.degrees.tp).items()
        if tower_of(pattern, network.towers) not in whole
    }
    link, frozen = _link(module), [name for name, each in module.named_parameters() if not each.requires_grad]
    for name, each in list(module.named_modules()):
        for pattern, style in patterns.items():
            if matches_module(name, pattern):
                parallelize_module(each, mesh, STYLES[style](), src_data_rank=None)
                if plan.compile and style.startswith("embedding"):
                    # A compiled block would take the collective's unfinished tensor apart and lose its backward.
                    each.register_forward_hook(lambda _, __, out: out.clone())
    for name, first in link.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, module.get_parameter(first))
    for name in frozen:  # some of torch's styles make parameters anew, and those are trained
        module.get_parameter(name).requires_grad_(False)


def _link(module: nn.Module) -> dict[str, str]:
    """Return, for each further name of a shared parameter, its first name."""
    first: dict[int, str] = {}
    names = module.named_parameters(remove_duplicate=False)
    pairs = [(name, first.setdefault(id(each), name)) for name, each in names]
    return {name: owner for name, owner in pairs if name != owner}


class Held(ParallelStyle):
    """The module's own parameters become DTensors, replicated but for those in `placements`.

    `enter` changes the first tensor that the module takes, `leave` the first that it returns.
    """

    def __init__(self, enter: Change | None = None, leave: Change | None = None, **placements: Placement) -> None:
        super().__init__()
        self._enter, self._leave, self._placements = enter, leave, placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for leaf, each in list(module.named_parameters(recurse=False)):
            placement = self._placements.get(leaf, Replicate())
            held = distribute_tensor(each, device_mesh, [placement], src_data_rank=None)
            module.register_parameter(leaf, nn.Parameter(held, requires_grad=each.requires_grad))
        if self._enter is not None:
            module.register_forward_pre_hook(lambda _, taken: _with_first(taken, self._enter, device_mesh))
        if self._leave is not None:
            module.register_forward_hook(lambda _, __, given: _with_first(given, self._leave, device_mesh))
        return module


class Placed(ParallelStyle):
    """A module that puts rows into a stream of which each rank has a part of the positions.

    It takes the stream, the rows, which every rank has whole, and for each position of the sequence its row. Each rank
    knows an addend of the rows' gradient, and gets the sum.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, size = device_mesh.get_local_rank(), device_mesh.size()

        def enter(_: nn.Module, taken: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            stream, rows, slots = taken
            rows = _given_back_for_addends(_taken_as(Replicate())(rows, device_mesh), device_mesh)
            return stream, rows, slots.chunk(size, dim=1)[rank]

        module.register_forward_pre_hook(enter)
        return module


class Copied(RowwiseParallel):
    """Rowwise, for the end of a block: FSDP warns of a block that returns a view, as a DTensor's local part is."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, __, out: out.clone())
        return module


def _with_first(values: Any, change: Change | None, mesh: DeviceMesh) -> Any:
    assert change is not None
    if isinstance(values, tuple):
        return (change(values[0], mesh), *values[1:])
    return change(values, mesh)


def _taken_as(placement: Placement, *, gradient: Placement | None = None) -> Change:
    """Return how a plain tensor is understood; its gradient comes back as `gradient` where that differs."""
    options: dict[str, Any] = {} if gradient is None else {"grad_placements": (gradient,)}
    return lambda x, mesh: DTensor.from_local(x, mesh, (placement,), run_check=False, **options)


def _given_back(x: Tensor, mesh: DeviceMesh) -> Tensor:
    assert isinstance(x, DTensor)
    return x.to_local()


def _given_back_for_addends(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a replicated result, of whose gradient each rank knows an addend."""
    assert isinstance(x, DTensor)
    return x.to_local(grad_placements=(Partial(),))


def _gathered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the whole sequence, which each rank had a part of."""
    return DTensor.from_local(x, mesh, (Shard(1),), run_check=False).redistribute(placements=(Replicate(),))


def _gathered_for_addends(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the whole sequence as a plain tensor, of whose gradient each rank knows an addend."""
    return _given_back_for_addends(_gathered(x, mesh), mesh)


def _summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's positions of the sum of all ranks' addends."""
    return DTensor.from_local(x, mesh, (Partial(),), run_check=False).redistribute(placements=(Shard(1),)).to_local()


# What the names in a network's tensor plan mean. Plain tensors travel between modules, whole unless the name says
# otherwise: `sequence` is a part of the positions, `colwise` makes a part of the columns, `addend` a part of a sum.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "rowwise-copied": Copied,
    "rowwise-to-sequence": partial(RowwiseParallel, output_layouts=Shard(1)),
    "embedding": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding-to-sequence": partial(RowwiseParallel, input_layouts=Replicate(), output_layouts=Shard(1)),
    "colwise-logits": partial(ColwiseParallel, use_local_output=False),
    "sequence-to-logits": partial(ColwiseParallel, input_layouts=Shard(1), use_local_output=False),
    "sequence": partial(SequenceParallel, use_local_output=True),
    "gather-sequence": partial(Held, _gathered),
    "heads": partial(Held, _taken_as(Shard(2)), _given_back),
    "replicated": partial(Held, _taken_as(Replicate()), _given_back),
    "parameters": Held,
    "place": Placed,
    "mixture": partial(Held, _gathered_for_addends, _summed),
    "addend-colwise": partial(Held, _taken_as(Replicate(), gradient=Partial()), _given_back, weight=Shard(0)),
    "addend-rowwise": partial(Held, _taken_as(Shard(-1)), _given_back, weight=Shard(1)),
    "addend-replicated": partial(Held, _taken_as(Replicate(), gradient=Partial()), _given_back_for_addends),
}
