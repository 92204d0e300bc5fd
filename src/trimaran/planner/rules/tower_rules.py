"""Checks the settings of single towers, for our trainer."""

from collections.abc import Iterable

from trimaran.core import Plan, Recipe, UserError, did_you_mean
from trimaran.core.plan import TowerPlan
from trimaran.models import Spec, vision_of
from trimaran.planner.degrees import either

# The tower that ends in the loss. Tensor parallelism splits its residual stream along the sequence.
MAIN = "language"
# The tower that takes images. Tensor-parallel ranks that all hold it encode different ones.
FIRST = "vision"


def check_known_towers(names: Iterable[str], towers: list[str], *, of: str, code: str, where: str) -> None:
    """Raise for the first name that no tower has."""
    for name in names:
        if name not in towers:
            raise UserError(code, f"{of} has no tower '{name}'{did_you_mean(name, towers)}", where=f"{where}.{name}",
                            fix=f"its towers are {', '.join(towers)}")  # fmt: skip


def check_towers(plan: Plan, recipe: Recipe, spec: Spec | None) -> None:
    """Raise for settings that a single tower cannot have."""
    for name, own in plan.towers.items():
        if recipe.model.kind.is_hf and vision_of(spec) is None and own != TowerPlan():
            raise UserError("P023", "towers of a Hugging Face model cannot have their own settings",
                            where=f"plan.towers.{name}",
                            fix="set plan.sharding and plan.recompute for the whole model")  # fmt: skip
        check_tower_sharding(name, own, plan)
        check_tower_degree(name, own, plan)


def check_tower_sharding(name: str, own: TowerPlan, plan: Plan) -> None:
    """Raise unless a tower's sharding is possible next to the rest."""
    if own.sharding is None or own.sharding == plan.sharding:
        return
    where = f"plan.towers.{name}.sharding"
    if plan.engine_traits.shards_weights_itself:
        raise UserError("P053", "DeepSpeed shards all towers alike", where=where,
                        fix="leave it out, or set plan.engine to torch")  # fmt: skip
    if plan.sharding == "none" and not splits_images(name, plan):
        raise UserError("P053", f"tower {name} cannot be sharded while plan.sharding is none", where=where,
                        fix=_fix_of_sharding_alone(name, own, plan))  # fmt: skip
    if plan.offload == "parameters":
        raise UserError("P053", f"offload parameters needs sharding parameters, but tower {name} has {own.sharding}",
                        where=where, fix="leave it out, or set plan.offload to optimizer")  # fmt: skip


def _fix_of_sharding_alone(name: str, own: TowerPlan, plan: Plan) -> str:
    """Return what gives the tower ranks to shard over: those of the plan, or tensor-parallel ones."""
    fix = f"set plan.sharding to {own.sharding}, and that of the other towers to none"
    if name == MAIN or plan.mesh.tp == 1:
        return fix
    return f"{fix}, or give {name if name == FIRST else f'{FIRST} and {name}'} tp 1"


def splits_images(name: str, plan: Plan) -> bool:
    """Return whether tensor-parallel ranks encode different images in the tower: it and the first have tp 1."""
    settings = (plan.towers.get(each, TowerPlan()) for each in (FIRST, name))
    return name != MAIN and all(each.tp == 1 < plan.mesh.tp for each in settings)


def check_tower_degree(name: str, own: TowerPlan, plan: Plan) -> None:
    """Raise unless the tower is unsplit, or split over all ranks of a tensor-parallel group."""
    tp = plan.mesh.tp
    if own.tp is None or own.tp == tp:
        return
    works = [tp] if name == MAIN else sorted({1, tp})
    if own.tp not in works:
        why = "tp splits its sequence" if name == MAIN else "a tower is split over all tp ranks or not at all"
        raise UserError("P054", f"tower {name} cannot have tp {own.tp} with mesh.tp {tp}: {why}",
                        where=f"plan.towers.{name}.tp", fix=f"use {either(works)}, or leave it out")  # fmt: skip
