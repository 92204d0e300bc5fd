"""Sharded parameters: each rank holds a slice and gathers a block when it needs it (FSDP2, HSDP)."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from trimaran.core import Plan
from trimaran.nets import Network


def apply_fsdp(network: Network, plan: Plan, mesh: DeviceMesh) -> None:
    """Shard each block, then the root, in place. Parameter names do not change.

    With `dp_replicate` above 1 the shards are replicated across that axis (HSDP). Weights stay in fp32 on their owner;
    bf16 plans gather them in bf16 and reduce gradients in fp32.
    """
    where = mesh if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
    gathered = torch.bfloat16 if plan.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in network.blocks:
        fully_shard(block, mesh=where, mp_policy=policy)
    fully_shard(network.module, mesh=where, mp_policy=policy)
