"""The cluster of a recipe, and the part of it that a run uses.

`environment` is an argument: only entry points read it.
"""

from collections.abc import Mapping
from dataclasses import replace

from trimaran.core import Recipe, UserError
from trimaran.machine.calibration import calibration_folder
from trimaran.machine.cluster import Cluster
from trimaran.machine.parse_cluster import parse_cluster


def cluster_of(recipe: Recipe, world_size: int, environment: Mapping[str, str]) -> Cluster:
    """Return the part of the recipe's cluster that `world_size` ranks use."""
    cluster = full_cluster(recipe, environment)
    if cluster.world_size != world_size and cluster.device.traits.shares_cores and cluster.num_nodes == 1:
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
