"""Applies a plan to a network, in the order of `ORDER`. Parameter names never change."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn
from torch.distributed.fsdp import FSDPModule

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.parallel.axes.cp import apply_cp
from trimaran.parallel.axes.ddp import apply_ddp
from trimaran.parallel.axes.ep import apply_ep
from trimaran.parallel.axes.fsdp import apply_fsdp, sharding_of_module
from trimaran.parallel.axes.image_split import apply_image_split
from trimaran.parallel.axes.tp import apply_tp
from trimaran.parallel.comm.compression import apply_compression
from trimaran.parallel.fp8 import apply_fp8
from trimaran.parallel.memory.activation_offload import apply_activation_offload
from trimaran.parallel.memory.compile import apply_compile
from trimaran.parallel.memory.recompute import apply_recompute
from trimaran.parallel.memory.regather import apply_regather
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.tower_plan import sharding_of

Apply = Callable[[Network, Plan, RankMesh], None]

SHARDING: dict[str, Apply] = {
    "none": apply_ddp,
    "optimizer": apply_fsdp,
    "gradients": apply_fsdp,
    "parameters": apply_fsdp,
}


def apply_plan(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Change the network's module in place so that it follows the plan."""
    for apply in ORDER:
        apply(network, plan, ranks)


def apply_sharding(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Shard or replicate parameters, gradients and optimizer state over the data-parallel ranks."""
    if plan.engine == "torch":  # DeepSpeed shards the module itself, later
        has_sharded_tower = any(sharding_of(tower, plan) != "none" for tower in network.towers)
        SHARDING["parameters" if has_sharded_tower else plan.sharding](network, plan, ranks)


ORDER: tuple[Apply, ...] = (
    apply_fp8,
    apply_tp,
    apply_ep,
    apply_cp,
    apply_image_split,
    apply_recompute,
    apply_regather,
    apply_activation_offload,
    apply_compile,
    apply_sharding,
    apply_compression,
)


def gradient_sync(module: nn.Module, plan: Plan) -> Callable[[bool], None]:
    """Return a function to call before each backward; its argument says whether it is the last of the step.

    Unsharded gradients are reduced once, in the last backward. Sharded gradients are reduce-scattered in each, so no
    rank holds them unsharded. Weights that stay unsharded between forward and backward are resharded in the last one.
    """
    if not hasattr(module, "set_requires_gradient_sync"):
        return lambda _: None
    units = [each for each in module.modules() if isinstance(each, FSDPModule)]
    if len({sharding_of_module(each, plan) for each in units}) > 1:
        return partial(_switch_each, units, plan)

    def switch(last: bool) -> None:
        if plan.sharding in ("none", "optimizer"):
            module.set_requires_gradient_sync(last)  # pyrefly: ignore[not-callable]
        if isinstance(module, FSDPModule) and plan.sharding in ("optimizer", "gradients"):
            module.set_reshard_after_backward(last)

    return switch


def _switch_each(units: Sequence[FSDPModule], plan: Plan, last: bool) -> None:
    """Switch each FSDP unit by its own sharding; used if towers are sharded differently."""
    for each in units:
        assert isinstance(each, nn.Module)
        sharding = sharding_of_module(each, plan)
        if sharding in ("none", "optimizer"):
            each.set_requires_gradient_sync(last, recurse=False)
        if sharding in ("optimizer", "gradients"):
            each.set_reshard_after_backward(last, recurse=False)
