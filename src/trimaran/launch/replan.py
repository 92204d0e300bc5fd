"""A new plan for a run that is under way: leaner after memory ran out, or for another number of ranks."""

import os
from collections.abc import Iterator
from dataclasses import replace

from trimaran.core import Mesh, Plan, Recipe, UserError
from trimaran.hardware import Cluster, calibration_folder, parse_cluster
from trimaran.models import outline_if_told, spec_of
from trimaran.planner import Question, check_plan, choose
from trimaran.planner.search import predicted

# What changes the numbers that training gives, and not only how they are come by: it stays as it was.
KEPT = ("precision", "engine", "comm")


def leaner(plan: Plan) -> tuple[Plan, str] | None:
    """Return a plan that needs less memory for activations, and what is different; None when there is none.

    The micro-batch gets smaller, with more of them, as far as it goes; then activations are computed again. The global
    batch stays.
    """
    if plan.micro_batch > 1:
        part = next(each for each in range(2, plan.micro_batch + 1) if plan.micro_batch % each == 0)
        micro, accum = plan.micro_batch // part, plan.grad_accum * part
        words = f"micro-batch {plan.micro_batch} -> {micro}, accumulation {plan.grad_accum} -> {accum}"
        return plan.model_copy(update={"micro_batch": micro, "grad_accum": accum, "prediction": None}), words
    if plan.recompute != "full":
        return plan.model_copy(update={"recompute": "full", "prediction": None}), f"recompute {plan.recompute} -> full"
    return None


def with_prediction(plan: Plan, recipe: Recipe) -> Plan:
    """Return `plan` with what it should cost, where the model's sizes are known. Raises what makes it illegal."""
    spec, outline = spec_of(recipe.model), outline_if_told(recipe.model, recipe.data)
    cluster = cluster_of(recipe, plan.mesh.world_size)
    check_plan(plan, recipe, spec, cluster)
    if outline is None:
        return plan
    return predicted(plan, Question(recipe=recipe, spec=spec, outline=outline, cluster=cluster, most_shown=1))


def smaller_sizes(plan: Plan, recipe: Recipe) -> range:
    """Return the world sizes below the plan's that the recipe allows, the largest first."""
    fewest = recipe.faults.ranks[0] if recipe.faults.ranks else plan.mesh.world_size
    return range(plan.mesh.world_size - 1, fewest - 1, -1)


def resized(plan: Plan, recipe: Recipe, world_size: int) -> Plan | None:
    """Return the best plan for `world_size` ranks that trains what `plan` trains; None where there is none."""
    try:
        cluster = cluster_of(recipe, world_size)
    except UserError:
        return None
    spec, outline = spec_of(recipe.model), outline_if_told(recipe.model, recipe.data)
    for pins in _looser(recipe.plan if isinstance(recipe.plan, Plan) else Plan(), plan):
        try:
            return choose(recipe.model_copy(update={"plan": pins}), spec, cluster, outline)
        except UserError:
            continue
    return None


def _looser(pins: Plan, plan: Plan) -> Iterator[Plan]:
    """Yield a person's pins with ever less of what belongs to a number of ranks."""
    kept = {name: getattr(plan, name) for name in KEPT}
    tree = {name: getattr(pins, name) for name in pins.model_fields_set - {"prediction"}} | kept
    yield Plan(**tree)
    batch = {name: value for name, value in tree.items() if name not in ("micro_batch", "grad_accum")}
    inner = {axis: getattr(pins.mesh, axis) for axis in pins.mesh.model_fields_set - {"dp_replicate", "dp_shard"}}
    yield Plan(**batch | {"mesh": Mesh(**inner)})
    yield Plan(**{name: value for name, value in batch.items() if name not in ("mesh", "pipeline", "sharding")})


def full_size(recipe: Recipe) -> int:
    """Return how many ranks the recipe's cluster is for."""
    return _whole_cluster(recipe).world_size


def cluster_of(recipe: Recipe, world_size: int) -> Cluster:
    """Return the part of the recipe's cluster that `world_size` ranks fill."""
    cluster = _whole_cluster(recipe)
    if cluster.world_size == world_size:
        return cluster
    if cluster.device.kind == "cpu" and cluster.num_nodes == 1:
        return parse_cluster(f"{world_size}xcpu", calibrations=calibration_folder(os.environ))
    per_node = min(world_size, cluster.devices_per_node)
    if world_size % per_node:
        raise UserError("C003", f"{world_size} devices do not fill equal nodes of {per_node}", where="faults.ranks",
                        fix=f"use multiples of {per_node}")  # fmt: skip
    return replace(cluster, num_nodes=world_size // per_node, devices_per_node=per_node)


def _whole_cluster(recipe: Recipe) -> Cluster:
    visible, measured = os.environ.get("CUDA_VISIBLE_DEVICES"), calibration_folder(os.environ)
    return parse_cluster(recipe.cluster, visible_devices=visible, calibrations=measured)
