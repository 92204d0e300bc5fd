"""Says for which axes all waits for other ranks are measured."""

from collections.abc import Sequence

from torch import nn

from trimaran.core import Plan
from trimaran.core.comm_axes import WORLD, comm_axes
from trimaran.nets import Network
from trimaran.nets.shard_types import is_dtensor


def measured_axes(plan: Plan, networks: Sequence[Network]) -> dict[str, bool]:
    """Return for each axis of the plan whether all its waits are measured.

    Compiled blocks run their collectives inside torch's code, and layers from elsewhere run those of DTensor. DeepSpeed
    has its own. Replicas of sharded weights reduce in the same call as the shards, so their wait is part of that axis.
    """
    measured = dict.fromkeys(comm_axes(plan), True)
    missing: list[str] = ["tp", "cp"] if plan.compile else []
    if not plan.engine_traits.times_collectives:
        missing += [axis for axis in measured if axis != WORLD]
    if plan.sharding != "none" and plan.mesh.shards > 1 and not plan.comm.local.is_on:
        missing.append("dp_replicate")
    if plan.mesh.tp > 1 and any(_uses_dtensor(each) for network in networks for each in network.module.modules()):
        missing.append("tp")
    return {axis: axis not in missing for axis in measured}


def _uses_dtensor(module: nn.Module) -> bool:
    """Return whether a tensor-parallel layer leaves its communication to DTensor."""
    from trimaran.parallel.axes.sharded_modules import computes_with_shards  # noqa: PLC0415  with tp it is imported

    if not isinstance(module, nn.Linear | nn.Embedding) or computes_with_shards(module):
        return False
    sharded = (each for each in module.parameters(recurse=False) if is_dtensor(each))
    return any("tp" in (each.device_mesh.mesh_dim_names or ()) for each in sharded)
