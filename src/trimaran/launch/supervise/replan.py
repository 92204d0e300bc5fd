"""A new plan for a started run: with less memory after an OOM, or for another number of ranks.

The planner is imported only then: most runs need no new plan.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trimaran.core import Comm, Mesh, Plan, Recipe, UserError
from trimaran.machine import Cluster
from trimaran.machine import run_cluster as clusters

if TYPE_CHECKING:
    from trimaran.models.hf_facts import HfFacts
    from trimaran.planner import Question

# Fields that change the results of training, not only how they are computed. They stay as they were.
FIXED_FIELDS = ("precision", "engine", "comm")


def less_memory(plan: Plan, recipe: Recipe, *, may_offload: bool = True) -> tuple[Plan, str] | None:
    """Return the plan to continue with after an OOM, and what changes; None if nothing is left to change."""
    from trimaran.planner.memory_ladder import next_rung  # noqa: PLC0415

    try:
        question = question_of(recipe, plan.mesh.world_size)
    except UserError:
        question = None
    return next_rung(plan, question, may_offload=may_offload)


def question_of(recipe: Recipe, world_size: int) -> "Question":
    """Return what the planner needs to predict plans of the recipe on `world_size` ranks."""
    from trimaran.planner import change_plan  # noqa: PLC0415

    return change_plan.question_of(recipe, world_size, os.environ)


def with_prediction(plan: Plan, recipe: Recipe) -> Plan:
    """Return `plan` with its prediction, if the model's outline is known. Raises if the plan is not valid."""
    from trimaran.planner import change_plan  # noqa: PLC0415

    return change_plan.with_prediction(plan, recipe, os.environ)


def smaller_sizes(plan: Plan, recipe: Recipe) -> range:
    """Return the world sizes below the plan's that the recipe allows, the largest first."""
    fewest = recipe.faults.ranks[0] if recipe.faults.ranks else plan.mesh.world_size
    return range(plan.mesh.world_size - 1, fewest - 1, -1)


def resized(plan: Plan, recipe: Recipe, world_size: int) -> Plan | None:
    """Return the best plan for `world_size` ranks with the same results as `plan`; None if there is none."""
    from trimaran.models import outline_if_known, spec_of  # noqa: PLC0415
    from trimaran.planner import choose  # noqa: PLC0415

    try:
        cluster = cluster_of(recipe, world_size)
    except UserError:
        return None
    spec, outline = spec_of(recipe.model), outline_if_known(recipe.model, recipe.data)
    facts = _known_facts(plan, recipe)
    for pins in _looser(recipe.plan if isinstance(recipe.plan, Plan) else Plan(), plan):
        try:
            return choose(recipe.model_copy(update={"plan": pins}), spec, cluster, outline, facts)
        except UserError:
            continue
    return None


def _known_facts(plan: Plan, recipe: Recipe) -> "HfFacts | None":
    """Return what our trainer can do with a Hugging Face model. If that is not known, the axes of `plan` work."""
    from trimaran.models.hf_facts import HfFacts, cached_facts  # noqa: PLC0415

    facts = cached_facts(recipe.model, os.environ)
    if facts is not None or not recipe.model.kind.is_hf:
        return facts
    unknown = UserError("M026", "whether the model supports this axis is not known", where="plan.mesh",
                        fix="plan the run for this number of ranks: `trimaran plan`")  # fmt: skip
    return HfFacts(
        without_tp=unknown if plan.mesh.tp == 1 else None,
        without_cp=unknown if plan.mesh.cp == 1 else None,
        has_fp8_layers=plan.precision == "fp8",
    )


def _looser(pins: Plan, plan: Plan) -> Iterator[Plan]:
    """Yield the user's pinned fields, with fewer and fewer of those that depend on the number of ranks."""
    fixed = {name: getattr(plan, name) for name in FIXED_FIELDS} | {"comm": _same_results(pins.comm, plan.comm)}
    tree = {name: getattr(pins, name) for name in pins.model_fields_set - {"prediction"}} | fixed
    yield Plan(**tree)
    batch = {name: value for name, value in tree.items() if name not in ("micro_batch", "grad_accum")}
    if pins.rows_by_rank:  # of as many data ranks as there were
        del batch["micro_batches"]
    inner = {axis: getattr(pins.mesh, axis) for axis in pins.mesh.model_fields_set - {"dp_replicate", "dp_shard"}}
    yield Plan(**batch | {"mesh": Mesh(**inner)})
    yield Plan(**{name: value for name, value in batch.items() if name not in ("mesh", "pipeline", "sharding")})


def _same_results(pins: Comm, comm: Comm) -> Comm:
    """Return how ranks communicate, without `overlap`: it changes no results, and only full replicas do without it."""
    pinned = {"overlap": pins.overlap} if "overlap" in pins.model_fields_set else {}
    return Comm.model_validate(comm.model_dump(exclude={"overlap"}) | pinned)


def full_size(recipe: Recipe) -> int:
    """Return the number of ranks of the recipe's full cluster."""
    return clusters.full_cluster(recipe, os.environ).world_size


def cluster_of(recipe: Recipe, world_size: int) -> Cluster:
    """Return the part of the recipe's cluster that `world_size` ranks use."""
    return clusters.cluster_of(recipe, world_size, os.environ)
