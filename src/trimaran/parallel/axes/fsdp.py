"""Sharded training with FSDP2: what is sharded, and for how long the rest stays whole, is the ZeRO stage."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import nn

# The composable form keeps parameter names; it sits under an underscore.
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_split
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trimaran.core import Plan
from trimaran.core.plan import Sharding
from trimaran.nets import Network
from trimaran.nets.moe import ExpertWeights
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.precision import CONTAINERS, gathered
from trimaran.parallel.tower_plan import sharding_of, tower_of

MARK = "_shared_as"


def apply_fsdp(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Shard each block, then the root, in place. Parameter names do not change.

    The update is sharded at every stage. `optimizer` gathers the weights once a step and reduces whole gradients with
    the last micro-batch; `gradients` reduces them with each, so they stay sharded; `parameters` also frees a block's
    weights after its forward. With `dp_replicate` above 1 the shards are replicated across that axis (HSDP). Weights
    stay in fp32 on their owner; they are gathered in what their module computes in, and gradients are summed in fp32.
    A tower may do one of these by itself, or be replicated (`none`) beside others that are sharded.
    """
    for unit in units_of(network, plan):
        for experts in [*experts_of(unit.module, ranks)]:
            _shard(replace(unit, module=experts), plan, ranks)
        _shard(unit, plan, ranks, is_root=unit.module is network.module)
    prefetch(network, plan.comm.prefetch)


@dataclass(frozen=True, slots=True)
class FsdpUnit:
    """A module whose own weights travel together; what they are gathered in, None: as they are; who shares them."""

    module: nn.Module
    dtype: torch.dtype | None
    sharding: Sharding


def units_of(network: Network, plan: Plan) -> list[FsdpUnit]:
    """Return what is sharded by itself, inner modules first and the root last.

    What a tower has outside of its blocks belongs to the root, unless the tower is sharded in another way than the
    root: then the tower is a unit as well.
    """
    names = {id(module): name for name, module in network.module.named_modules()}
    *inner, (root, dtype) = gathered(network, plan)
    shardings = {tower: sharding_of(tower, plan) for tower in network.towers}
    taken = {id(module) for module, _ in inner}
    for tower, prefix in network.towers.items():
        module = _submodule(network.module, prefix.removesuffix("."))
        if module is not None and shardings[tower] != plan.sharding and id(module) not in taken | {id(root)}:
            inner.append((module, dtype))
    units = [FsdpUnit(module, dtype, shardings[tower_of(names[id(module)], network.towers)]) for module, dtype in inner]
    return [*units, FsdpUnit(root, dtype, plan.sharding)]


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    """Return the tower of that name, None where a stage has nothing of it or it is but a table of blocks."""
    for part in name.split(".") if name else ():
        module = getattr(module, part, None) or nn.ModuleList()
    return None if isinstance(module, CONTAINERS) else module


def _shard(unit: FsdpUnit, plan: Plan, ranks: RankMesh, *, is_root: bool = False) -> None:
    """Spread the weights of one unit over the ranks, as its tower wants it."""
    module, experts = unit.module, split_experts(unit.module, ranks)
    setattr(module, MARK, unit.sharding)
    policy = MixedPrecisionPolicy(param_dtype=unit.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if unit.sharding == "none":
        replicate_split(module, mesh=ranks.experts["expert_shard"] if experts else ranks.data, mp_policy=policy)
        if experts:
            divide_as_everywhere(module, ranks, scattered=False)
        return
    where, keep = ranks.shards, reshard_after_forward(plan, unit.sharding)
    if experts:
        where, keep = ranks.experts["expert_replicate", "expert_shard"], bool(keep)
    if is_root:  # backward begins where forward ended: what the root holds is needed at once
        keep = plan.comm.reshard == "always"
    fully_shard(
        module,
        # Shards that have replicas lie on two axes.
        mesh=where if ranks.degrees.dp_replicate > 1 else where[str(where.mesh_dim_names[-1])],  # pyrefly: ignore
        reshard_after_forward=keep,
        mp_policy=policy,
        offload_policy=_offload(plan, ranks),
    )
    if experts:
        divide_as_everywhere(module, ranks, scattered=ranks.experts["expert_shard"].size() > 1)


def shared_as(module: nn.Module, plan: Plan) -> Sharding:
    """Return how the weights that travel with this module are shared."""
    return getattr(module, MARK, plan.sharding)


def reshard_after_forward(plan: Plan, sharding: Sharding) -> bool | int:
    """Return what becomes of a block's gathered weights: freed, kept, or kept split over a few ranks.

    A pipeline would gather them again for every micro-batch, so there they are kept unless a person says otherwise.
    """
    if isinstance(plan.comm.reshard, int):
        return plan.comm.reshard if sharding == "parameters" else False
    frees = sharding == "parameters" and plan.mesh.pp == 1
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
    return ranks.degrees.ep > 1 and isinstance(module, ExpertWeights)


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
