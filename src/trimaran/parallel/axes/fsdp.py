"""Sharded training with FSDP2: what is sharded, and for how long the rest stays whole, is the ZeRO stage."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.nets.mixture import Experts
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.precision import gathered


def apply_fsdp(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Shard each block, then the root, in place. Parameter names do not change.

    The update is sharded at every stage. `optimizer` gathers the weights once a step and reduces whole gradients with
    the last micro-batch; `gradients` reduces them with each, so they stay sharded; `parameters` also frees a block's
    weights after its forward. With `dp_replicate` above 1 the shards are replicated across that axis (HSDP). Weights
    stay in fp32 on their owner; they are gathered in what their module computes in, and gradients are summed in fp32.
    """
    replicated, reshard = ranks.degrees.dp_replicate > 1, reshard_after_forward(plan)

    def shard(module: nn.Module, dtype: torch.dtype | None) -> None:
        if split_experts(module, ranks):
            where, keep = ranks.experts["expert_replicate", "expert_shard"], bool(reshard)
        else:
            where, keep = ranks.shards, reshard
        if module is network.module:  # backward begins where forward ended: what the root holds is needed at once
            keep = plan.comm.reshard == "always"
        fully_shard(
            module,
            mesh=where if replicated else where[str(where.mesh_dim_names[-1])],  # pyrefly: ignore
            reshard_after_forward=keep,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
            offload_policy=_offload(plan, ranks),
        )
        if split_experts(module, ranks):
            divide_as_everywhere(module, ranks, scattered=ranks.experts["expert_shard"].size() > 1)

    for module, dtype in gathered(network, plan):
        for experts in experts_of(module, ranks):
            shard(experts, dtype)
        shard(module, dtype)
    prefetch(network, plan.comm.prefetch)


def reshard_after_forward(plan: Plan) -> bool | int:
    """Return what becomes of a block's gathered weights: freed, kept, or kept split over a few ranks.

    A pipeline would gather them again for every micro-batch, so there they are kept unless a person says otherwise.
    """
    if isinstance(plan.comm.reshard, int):
        return plan.comm.reshard
    frees = plan.sharding == "parameters" and plan.mesh.pp == 1
    return {"auto": frees, "always": True, "never": False}[plan.comm.reshard]


def prefetch(network: Network, num_blocks: int) -> None:
    """Gather the weights of `num_blocks` blocks ahead. FSDP2 does one by itself."""
    if num_blocks == 1:
        return
    blocks: list[FSDPModule] = [block for block in network.blocks if isinstance(block, FSDPModule)]
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + num_blocks])
        block.set_modules_to_backward_prefetch(list(islice(reversed(blocks[:number]), num_blocks)))


def split_experts(module: nn.Module, ranks: RankMesh) -> bool:
    """Return whether these are experts that lie on several ranks: those that hold the same ones are fewer."""
    return ranks.degrees.ep > 1 and isinstance(module, Experts)


def experts_of(module: nn.Module, ranks: RankMesh) -> Iterator[nn.Module]:
    """Yield the split experts inside `module` that nobody has spread over their ranks yet."""
    for each in module.modules():
        if each is not module and split_experts(each, ranks) and not isinstance(each, FSDPModule):
            yield each


def divide_as_everywhere(experts: nn.Module, ranks: RankMesh, *, scattered: bool) -> None:
    """Divide the gradients of split experts by the number of ranks that see different tokens, as all others are.

    A rank's gradient of its experts already has the tokens of all that share them, and is summed over fewer ranks.
    """
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(float(ranks.degrees.data))
    # The other way to divide is nccl's alone. Where there is nothing to scatter, FSDP2 divides when it copies, and
    # after a sum would divide again.
    experts.set_force_sum_reduction_for_comms(scattered)


def _offload(plan: Plan, ranks: RankMesh) -> OffloadPolicy:
    if plan.offload != "parameters":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=ranks.axes.device_type == "cuda")
