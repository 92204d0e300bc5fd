"""Per-tower settings of a plan: sharding, recompute, tensor parallelism and freezing."""

from collections.abc import Iterable

from torch import nn

from trimaran.core import Plan
from trimaran.core.plan import Recompute, Sharding
from trimaran.nets import Network
from trimaran.nets.network import refuse_unknown_tower, tower_of
from trimaran.nets.vlm.patch_layout import ImageAssignment

SHARDING_ATTRIBUTE = "_trimaran_sharding"  # of the module of an FSDP unit


def tower_of_blocks(network: Network) -> list[tuple[str, nn.Module]]:
    """Return the network's blocks in order, each with its tower."""
    names = {id(module): name for name, module in network.module.named_modules()}
    return [(tower_of(names[id(block)], network.towers), block) for block in network.blocks]


def freeze_towers(network: Network, names: Iterable[str]) -> None:
    """Freeze these towers: no gradients and no optimizer state. Runs before the plan is applied."""
    frozen = set(names)
    for name in frozen:
        refuse_unknown_tower(name, network.towers, code="M012", where="model.freeze")
    for name, parameter in network.module.named_parameters():
        if tower_of(name, network.towers) in frozen:
            parameter.requires_grad_(False)


def sharding_of(tower: str, plan: Plan) -> Sharding:
    """Return the sharding of the tower."""
    own = plan.towers.get(tower)
    return plan.sharding if own is None or own.sharding is None else own.sharding


def sharding_of_module(module: nn.Module, plan: Plan) -> Sharding:
    """Return the sharding of the FSDP unit of this module."""
    return getattr(module, SHARDING_ATTRIBUTE, plan.sharding)


def recompute_of(tower: str, plan: Plan) -> Recompute:
    """Return the recompute mode of the tower."""
    own = plan.towers.get(tower)
    return plan.recompute if own is None or own.recompute is None else own.recompute


def tp_degree(tower: str, plan: Plan) -> int:
    """Return the tensor-parallel degree of the tower."""
    own = plan.towers.get(tower)
    return plan.mesh.tp if own is None or own.tp is None else own.tp


def tp_replicated_towers(network: Network, plan: Plan) -> list[str]:
    """Return the towers with tp 1 in a plan with tensor parallelism: their weights are replicated."""
    return [tower for tower in network.towers if tp_degree(tower, plan) == 1 < plan.mesh.tp]


def image_split_towers(network: Network, plan: Plan) -> list[str]:
    """Return the replicated towers in which the ranks of a tensor-parallel group encode different images.

    The gradients of these towers are partial on each of these ranks.
    """
    replicated = tp_replicated_towers(network, plan)
    if "vision" not in replicated or not takes_images(network):
        return []
    return [tower for tower in ("vision", "projector") if tower in replicated]


def takes_images(network: Network) -> bool:
    """Return whether the network takes images."""
    return isinstance(getattr(network.module, "image_assignment", None), ImageAssignment)
