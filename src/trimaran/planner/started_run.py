"""What the planner needs to know of a run that has started: its part of the cluster, and what its model can do.

`environment` is an argument: only entry points read it.
"""

from collections.abc import Mapping
from dataclasses import replace

from trimaran.core import Plan, Recipe, UserError
from trimaran.hardware import Cluster, calibration_folder, parse_cluster
from trimaran.models import outline_if_known, spec_of
from trimaran.models.hf_facts import cached_facts
from trimaran.planner.legal import check_plan
from trimaran.planner.question import Question
from trimaran.planner.search import predicted


def question_of(recipe: Recipe, world_size: int, environment: Mapping[str, str]) -> Question:
    """Return what the planner needs to predict plans of the recipe on `world_size` ranks."""
    spec, outline = spec_of(recipe.model), outline_if_known(recipe.model, recipe.data)
    cluster, facts = cluster_of(recipe, world_size, environment), cached_facts(recipe.model, environment)
    return Question(recipe=recipe, spec=spec, outline=outline, cluster=cluster, max_plans=1, facts=facts)


def with_prediction(plan: Plan, recipe: Recipe, environment: Mapping[str, str]) -> Plan:
    """Return `plan` with its prediction, if the model's outline is known. Raises if the plan is not valid."""
    question = question_of(recipe, plan.mesh.world_size, environment)
    check_plan(plan, recipe, question.spec, question.cluster)
    return plan if question.outline is None else predicted(plan, question)


def cluster_of(recipe: Recipe, world_size: int, environment: Mapping[str, str]) -> Cluster:
    """Return the part of the recipe's cluster that `world_size` ranks use."""
    cluster = full_cluster(recipe, environment)
    if cluster.world_size != world_size and cluster.device.kind == "cpu" and cluster.num_nodes == 1:
        return parse_cluster(f"{world_size}xcpu", calibrations=calibration_folder(environment))
    return part_of(cluster, world_size)


def part_of(cluster: Cluster, world_size: int) -> Cluster:
    """Return the part of a cluster that `world_size` ranks use: whole nodes, or a part of one."""
    if cluster.world_size == world_size:
        return cluster
    per_node = min(world_size, cluster.devices_per_node)
    if world_size % per_node:
        raise UserError("C003", f"{world_size} devices do not fill equal nodes of {per_node}", where="faults.ranks",
                        fix=f"use multiples of {per_node}")  # fmt: skip
    # Of several kinds of devices it is not known which are left: the plan is for the one with the least memory.
    return replace(cluster, num_nodes=world_size // per_node, devices_per_node=per_node, groups=())


def full_cluster(recipe: Recipe, environment: Mapping[str, str]) -> Cluster:
    """Return the recipe's cluster."""
    visible, measured = environment.get("CUDA_VISIBLE_DEVICES"), calibration_folder(environment)
    return parse_cluster(recipe.cluster, visible_devices=visible, calibrations=measured)
