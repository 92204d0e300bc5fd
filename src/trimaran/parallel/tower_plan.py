"""Towers: the parts of a network that are trained, sharded and computed again each in its own way."""

from collections.abc import Iterable, Mapping

from torch import nn

from trimaran.core import Plan, UserError, nearest
from trimaran.core.plan import Recompute, Sharding
from trimaran.nets import Network


def tower_of(name: str, towers: Mapping[str, str]) -> str:
    """Return the tower of the parameter or module `name`: that with the longest prefix, and the last where none has.

    `towers` has the prefix of each tower, as `Network.towers` does. What belongs to none is the root's own: the last
    tower ends in the loss, and so does the root.
    """
    fitting = [tower for tower, prefix in towers.items() if f"{name}.".startswith(prefix)]
    return max(fitting, key=lambda tower: len(towers[tower]), default=[*towers][-1])


def tower_of_blocks(network: Network) -> list[tuple[str, nn.Module]]:
    """Return the network's blocks in their order, each with its tower."""
    names = {id(module): name for name, module in network.module.named_modules()}
    return [(tower_of(names[id(block)], network.towers), block) for block in network.blocks]


def freeze_towers(network: Network, names: Iterable[str]) -> None:
    """Leave these towers as they are: no gradient, no optimizer state. Comes before the plan is applied."""
    frozen = set(names)
    for name in frozen:
        refuse_unknown(name, network.towers, code="M012", where="model.freeze")
    for name, parameter in network.module.named_parameters():
        if tower_of(name, network.towers) in frozen:
            parameter.requires_grad_(False)


def refuse_unknown(name: str, towers: Iterable[str], *, code: str, where: str) -> None:
    """Raise unless there is such a tower."""
    known = list(towers)
    if name not in known:
        raise UserError(code, f"the network has no tower '{name}'{nearest(name, known)}", where=where,
                        fix=f"its towers are {', '.join(known)}")  # fmt: skip


def sharding_of(tower: str, plan: Plan) -> Sharding:
    """Return what the data ranks share of the tower's states."""
    own = plan.towers.get(tower)
    return plan.sharding if own is None or own.sharding is None else own.sharding


def recompute_of(tower: str, plan: Plan) -> Recompute:
    """Return what the tower computes again in backward."""
    own = plan.towers.get(tower)
    return plan.recompute if own is None or own.recompute is None else own.recompute


def tensor_degree(tower: str, plan: Plan) -> int:
    """Return how many ranks share each matrix of the tower."""
    own = plan.towers.get(tower)
    return plan.mesh.tp if own is None or own.tp is None else own.tp


def whole_towers(network: Network, plan: Plan) -> list[str]:
    """Return the towers that tensor parallelism does not split, though it splits others."""
    return [tower for tower in network.towers if tensor_degree(tower, plan) == 1 < plan.mesh.tp]
