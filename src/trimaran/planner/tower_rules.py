"""What towers may do differently from the rest of their network, in our trainer."""

from collections.abc import Iterable

from trimaran.core import Plan, Recipe, UserError, nearest
from trimaran.core.plan import TowerPlan
from trimaran.models import Spec, VlmSpec
from trimaran.planner.degrees import either

# What ends in the loss, and so has the stream that tensor parallelism splits along the sequence.
MAIN = "language"


def refuse_unknown(names: Iterable[str], towers: list[str], *, of: str, code: str, where: str) -> None:
    """Raise for the first name that no tower has."""
    for name in names:
        if name not in towers:
            raise UserError(code, f"{of} has no tower '{name}'{nearest(name, towers)}", where=f"{where}.{name}",
                            fix=f"its towers are {', '.join(towers)}")  # fmt: skip


def check_towers(plan: Plan, recipe: Recipe, spec: Spec | None) -> None:
    """Raise for what a tower cannot do by itself."""
    for name, own in plan.towers.items():
        if recipe.model.family == "hf" and not isinstance(spec, VlmSpec) and own != TowerPlan():
            raise UserError("P023", "the trainer does the same in every tower of a Hugging Face model",
                            where=f"plan.towers.{name}",
                            fix="set plan.sharding and plan.recompute for the whole network")  # fmt: skip
        check_share(name, own, plan)
        check_degree(name, own, plan)


def check_share(name: str, own: TowerPlan, plan: Plan) -> None:
    """Raise unless a tower can be sharded as it wants beside the rest."""
    if own.sharding is None or own.sharding == plan.sharding:
        return
    where = f"plan.towers.{name}.sharding"
    if plan.engine == "deepspeed":
        raise UserError("P053", "DeepSpeed shards a network in one way", where=where,
                        fix="leave it out, or set plan.engine to torch")  # fmt: skip
    if plan.sharding == "none":
        raise UserError("P053", f"tower {name} cannot be sharded while plan.sharding is none", where=where,
                        fix=f"set plan.sharding to {own.sharding}, and that of the other towers to none")  # fmt: skip
    if plan.offload == "parameters":
        raise UserError("P053", f"parameters are offloaded shard by shard, and tower {name} has {own.sharding}",
                        where=where, fix="leave it out, or set plan.offload to optimizer")  # fmt: skip


def check_degree(name: str, own: TowerPlan, plan: Plan) -> None:
    """Raise unless the tower is whole on every rank of a tensor-parallel group, or split over all of them."""
    tp = plan.mesh.tp
    if own.tp is None or own.tp == tp:
        return
    works = [tp] if name == MAIN else sorted({1, tp})
    if own.tp not in works:
        why = "its stream is split along the sequence" if name == MAIN else "it is whole, or split over all of them"
        raise UserError("P054", f"tower {name} cannot have tp {own.tp} beside mesh.tp {tp}: {why}",
                        where=f"plan.towers.{name}.tp", fix=f"use {either(works)}, or leave it out")  # fmt: skip
