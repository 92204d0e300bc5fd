"""Data parallelism with replicated parameters: gradients are averaged over the ranks."""

import gc
import weakref
from typing import Any

import torch._dynamo  # noqa: F401  DDP imports it when it is built

# The composable form keeps parameter names. It is private in torch, so only this module imports it.
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from trimaran.core import Plan
from trimaran.nets import Network, packed_parameters
from trimaran.parallel.axes.fsdp import experts_of, reducing_ranks, replicate_fsdp, set_expert_gradient_divisor
from trimaran.parallel.mesh import RankMesh


def apply_ddp(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """All-reduce gradients in buckets during backward; with DTensors or stages by FSDP2's `replicate`, not DDP."""
    # With local steps, replicas synchronise weights later, and only the ranks of a replica sum their gradients here.
    # Without overlap the stepper has `GradientBuckets`.
    data = reducing_ranks(plan, ranks)
    if data.size() == 1 or plan.reduces_after_backward:
        return
    mesh = ranks.degrees
    if mesh.tp == mesh.pp == mesh.ep == 1:
        replicate(network.module, **_ddp_options(network, plan, data))
        return
    for block in network.blocks:
        for experts in experts_of(block, ranks):
            replicate_fsdp(experts, mesh=ranks.experts["expert_shard"])
            set_expert_gradient_divisor(experts, ranks, scattered=False)
        replicate_fsdp(block, mesh=data, ignored_params=packed_parameters(block))
    replicate_fsdp(network.module, mesh=data, ignored_params=packed_parameters(network.module))


def change_buckets(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Sum gradients in buckets of the plan's size from now on. All ranks must call; there must be no gradients.

    The new buckets have hooks of their own in backward. Those of the old ones go with them, so nobody may refer to them
    any more.
    """
    state: Any = replicate.state(network.module)
    if state._init_args:  # no forward yet: there are no buckets
        state._init_kwargs["bucket_cap_mb"] = plan.comm.bucket_mb
        return
    old, state._ddp = state._ddp_weakref, None
    gc.collect()
    if old() is not None:
        raise RuntimeError("the old gradient buckets are still in use")
    state._ddp = DistributedDataParallel(state._param_list, **_ddp_options(network, plan, reducing_ranks(plan, ranks)))
    state._ddp_weakref = weakref.ref(state._ddp)


def _ddp_options(network: Network, plan: Plan, data: DeviceMesh) -> dict[str, Any]:
    return {
        "process_group": data.get_group(),
        "bucket_cap_mb": plan.comm.bucket_mb,
        "gradient_as_bucket_view": True,
        # It also keeps DDP from rebuilding its buckets after the first backward of every start. With three or more
        # ranks the order of summation depends on the buckets, so a resumed run would round differently.
        "find_unused_parameters": network.may_leave_out_parameters or data.size() > 2,
    }
