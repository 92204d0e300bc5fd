"""Shards or replicates parameters with FSDP2, and times the waits for its all-gathers and reductions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

# The composable form keeps parameter names. It is private in torch.
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from trimaran.core import DEVICE_TRAITS, Plan, Sharding, unit_sizes
from trimaran.nets import DecoderLayer, ExpertWeights, Network, PredictionLayer, is_spread, packed_parameters, tower_of
from trimaran.parallel.axes.image_split import image_split_towers
from trimaran.parallel.comm.axis_waits import AXIS_WAITS
from trimaran.parallel.disk_store import put_on_disk
from trimaran.parallel.fp8_linear import gather_in_fp8
from trimaran.parallel.mesh import SHARDING_ATTRIBUTE, RankMesh, sharding_of
from trimaran.parallel.precision import CONTAINERS, fsdp_modules

REPLICATED_ATTRIBUTE = "_trimaran_replicated"  # of parameters that no unit shards; the caller reduces their gradients


def apply_fsdp(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Shard each block, or several small ones together, then the root, in place. Parameter names do not change.

    The update is sharded in every mode. `optimizer` (ZeRO-1) all-gathers the weights once per step and reduce-scatters
    gradients in the last micro-batch. `gradients` (ZeRO-2) reduce-scatters in each micro-batch, so gradients stay
    sharded. `parameters` (ZeRO-3) also reshards a block's weights after its forward. With `dp_replicate` above 1 the
    shards are replicated over that mesh dim (HSDP). Sharded weights are fp32; they are all-gathered in the compute
    dtype of their module, and gradients are reduced in fp32. A tower may use its own mode, or be replicated (`none`).
    A tower in which tensor-parallel ranks encode different images is sharded over these ranks, too.
    """
    units = units_of(network, plan)
    if sharded_image_towers(network, plan):  # creates process groups, also on stages without these towers
        _ = ranks.shards_and_tp
    for unit in units:
        for experts in [each for module in unit.modules for each in experts_of(module, ranks)]:
            _shard(replace(unit, modules=(experts,)), plan, ranks)
        _shard(unit, plan, ranks, is_root=unit.modules[0] is network.module)
    gathered = [group.fsdp_params for group in parameter_groups(network.module)]
    if plan.offloads_to_disk and plan.offload == "parameters" and not ranks.without_device:
        put_on_disk(gathered, Path(plan.disk.path), ranks.device)
    if plan.fp8.all_gather:
        gather_in_fp8(network.module, [each for group in gathered for each in group], ranks.device)
    if plan.comm.prefetch > 1:  # FSDP2 prefetches one by default
        prefetch([unit for unit in units if unit.modules[0] in network.blocks], plan.comm.prefetch)


def change_prefetch(network: Network, plan: Plan) -> None:
    """Prefetch as many blocks as `plan` says from the next forward on."""
    prefetch([unit for unit in units_of(network, plan) if unit.modules[0] in network.blocks], plan.comm.prefetch)


@dataclass(frozen=True, slots=True)
class FsdpUnit:
    """One FSDP unit: its modules, the all-gather dtype (None: as stored) and its sharding.

    The weights of a unit are all-gathered together, and its gradients are reduced together. Several modules run one
    after another, each on the output of the one before. With `spans_tp` the tensor-parallel ranks hold shards, too.
    """

    modules: tuple[nn.Module, ...]
    dtype: torch.dtype | None
    sharding: Sharding
    spans_tp: bool = False


def units_of(network: Network, plan: Plan) -> list[FsdpUnit]:
    """Return the FSDP units, inner modules first and the root last.

    Parameters of a tower outside its blocks belong to the root unit, unless the tower is sharded differently from the
    root: then the tower is a unit too.
    """
    names = {id(module): name for name, module in network.module.named_modules()}
    *inner, (root, dtype) = fsdp_modules(network, plan)
    shardings = {tower: sharding_of(tower, plan) for tower in network.towers}
    spanning = sharded_image_towers(network, plan)
    taken = {id(module) for module, _ in inner}
    for tower, prefix in network.towers.items():
        # A stage may have no part of a tower, or a tower may be only a container of blocks.
        module, differs = network.module, shardings[tower] != plan.sharding
        for part in prefix.removesuffix(".").split(".") if prefix else ():
            module = getattr(module, part, None) or nn.ModuleList()
        is_unit = not isinstance(module, CONTAINERS) and (differs or tower in spanning)
        if is_unit and id(module) not in taken | {id(root)}:
            inner.append((module, dtype))
    towers = [tower_of(names[id(module)], network.towers) for module, _ in inner]
    units = [
        FsdpUnit((module,), dtype, shardings[tower], tower in spanning)
        for (module, dtype), tower in zip(inner, towers, strict=True)
    ]
    return [*_joined(units, names, plan), FsdpUnit((root,), dtype, plan.sharding)]


def sharded_image_towers(network: Network, plan: Plan) -> set[str]:
    """Return the towers that are sharded over tensor-parallel ranks, too; in a pipeline the same for all stages."""
    return {tower for tower in image_split_towers(network, plan) if sharding_of(tower, plan) != "none"}


def _joined(units: Sequence[FsdpUnit], names: Mapping[int, str], plan: Plan) -> list[FsdpUnit]:
    """Return the units, where small decoder layers in a row share one. It takes the place of its last layer."""
    rows: dict[tuple[object, ...], list[FsdpUnit]] = {}
    for unit in units:
        (module,) = unit.modules
        is_layer = isinstance(module, DecoderLayer) and not isinstance(module, PredictionLayer)  # not always called
        if is_layer and unit.sharding != "none":
            rows.setdefault((names[id(module)].rpartition(".")[0], unit.dtype, unit.sharding), []).append(unit)
    joined: dict[int, tuple[nn.Module, ...]] = {}  # by the last layer of a unit; the others have none
    for row in rows.values():
        layers = [unit.modules[0] for unit in row]
        parameters = sum(each.numel() for layer in layers for each in layer.parameters()) / len(layers)
        rest = iter(layers)
        for size in unit_sizes(plan, parameters, len(layers)):
            group = tuple(islice(rest, size))
            joined |= {id(layer): () for layer in group} | {id(group[-1]): group}
    changed = (replace(unit, modules=joined.get(id(unit.modules[0]), unit.modules)) for unit in units)
    return [unit for unit in changed if unit.modules]


def _shard(unit: FsdpUnit, plan: Plan, ranks: RankMesh, *, is_root: bool = False) -> None:
    module, experts = unit.modules[0], is_expert_parallel(unit.modules[0], ranks)
    for each in unit.modules:
        setattr(each, SHARDING_ATTRIBUTE, unit.sharding)
    policy = MixedPrecisionPolicy(param_dtype=unit.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if unit.sharding == "none":
        mesh = ranks.experts["expert_shard"] if experts else reducing_ranks(plan, ranks)
        replicate_fsdp(module, mesh=mesh, mp_policy=policy, ignored_params=packed_parameters(module))
        if experts:
            set_expert_gradient_divisor(module, ranks, scattered=False)
        return
    mesh, reshard = ranks.shards, reshard_after_forward(plan, unit.sharding)
    if unit.spans_tp:
        mesh = ranks.shards_and_tp
    if experts:
        mesh, reshard = ranks.experts["expert_replicate", "expert_shard"], bool(reshard)
    is_hsdp = ranks.degrees.dp_replicate > 1 and not plan.comm.local.is_on and plan.comm.compression == "none"
    if is_root:  # backward starts with the root's parameters, so they are needed at once
        reshard = plan.comm.reshard == "always"
    policy_of_offload = OffloadPolicy()
    if plan.offload == "parameters":  # a file cannot be pinned
        pinned = ranks.device_traits.has_own_memory and not plan.disk.path
        policy_of_offload = CPUOffloadPolicy(pin_memory=pinned)
    fully_shard(
        list(unit.modules) if len(unit.modules) > 1 else module,
        # HSDP needs both mesh dims. With local steps nothing is reduced over the replicas; compression does it itself.
        mesh=mesh if is_hsdp else mesh[str(mesh.mesh_dim_names[-1])],  # pyrefly: ignore
        reshard_after_forward=reshard,
        mp_policy=policy,
        offload_policy=policy_of_offload,
        # Parameters that were set apart, such as scalars, cannot be sharded.
        ignored_params={
            each
            for module in unit.modules
            for each in packed_parameters(module) | {p for p in module.parameters() if hasattr(p, REPLICATED_ATTRIBUTE)}
        },
    )
    if experts:
        set_expert_gradient_divisor(module, ranks, scattered=ranks.experts["expert_shard"].size() > 1)
    elif unit.spans_tp:  # tensor-parallel ranks sum the gradients of their images; data ranks average them
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(float(reducing_ranks(plan, ranks).size()))
        module.set_force_sum_reduction_for_comms(True)


def reducing_ranks(plan: Plan, ranks: RankMesh) -> DeviceMesh:
    """Return the ranks that average the gradients of each step: all data ranks, or with local steps one replica."""
    return ranks.shards["shard"] if plan.comm.local.is_on else ranks.data


def reshard_after_forward(plan: Plan, sharding: Sharding) -> bool | int:
    """Return FSDP2's `reshard_after_forward`: True reshards, False keeps, a number reshards to that many ranks.

    In a pipeline every micro-batch would all-gather the weights again, so they are kept unless the plan says otherwise.
    """
    if isinstance(plan.comm.reshard, int):
        return plan.comm.reshard if sharding == "parameters" else False
    automatic = sharding == "parameters" and plan.mesh.pp == 1
    return {"auto": automatic, "always": True, "never": False}[plan.comm.reshard]


def prefetch(units: Sequence[FsdpUnit], num_blocks: int) -> None:
    """Prefetch the weights of the next `num_blocks` units of blocks. With 1, FSDP2 does so by itself."""
    ahead = num_blocks if num_blocks > 1 else 0
    first = (unit.modules[0] for unit in units)
    blocks: list[FSDPModule] = [block for block in first if isinstance(block, FSDPModule)]
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + ahead])
        block.set_modules_to_backward_prefetch(list(islice(reversed(blocks[:number]), ahead)))


def parameter_groups(module: nn.Module) -> Iterator[FSDPParamGroup]:
    """Yield the FSDP parameter groups of the module and of those inside it."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            yield from own_parameter_groups(each)


def own_parameter_groups(unit: FSDPModule) -> list[FSDPParamGroup]:
    state: Any = unit._get_fsdp_state()
    # Before torch 2.13 a module had at most one group.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def is_expert_parallel(module: nn.Module, ranks: RankMesh) -> bool:
    """Return whether the module holds expert-parallel experts, which fewer ranks replicate than other parameters."""
    return ranks.degrees.ep > 1 and (isinstance(module, ExpertWeights) or is_spread(module))


def experts_of(module: nn.Module, ranks: RankMesh) -> Iterator[nn.Module]:
    """Yield the expert-parallel experts inside `module` that are not FSDP units yet."""
    for each in module.modules():
        if each is not module and is_expert_parallel(each, ranks) and not isinstance(each, FSDPModule):
            yield each


def set_expert_gradient_divisor(experts: nn.Module, ranks: RankMesh, *, scattered: bool) -> None:
    """Divide experts' gradients, of the tokens of their `ep` group, by the number of data ranks, like all others."""
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(float(ranks.degrees.data))
    # A sum reduction, because the pre-multiplied sum exists only in NCCL. Without a reduce-scatter FSDP2 divides in its
    # copy, and with a forced sum it would divide twice.
    experts.set_force_sum_reduction_for_comms(scattered)


class TimedParamGroup(FSDPParamGroup):
    """An FSDP parameter group that times its waits. On a GPU the stream waits, in this method; the host does not."""

    axis: str

    def wait_for_unshard(self) -> None:
        with AXIS_WAITS.span(self.axis):
            super().wait_for_unshard()


class TimedParamGroupOnCPU(TimedParamGroup):
    """The same on a CPU, where the host waits for all-gathers in `unshard` and for reductions in `post_backward`."""

    def unshard(self, async_op: bool = False) -> None:
        with AXIS_WAITS.span(self.axis):
            super().unshard(async_op)

    def post_backward(self, *unused: Any) -> None:
        with AXIS_WAITS.span(self.axis):
            super().post_backward(*unused)


def time_gathers(module: nn.Module, axis: str) -> None:
    """Make the FSDP parameter groups of `module` time their waits, as those of `axis`."""
    for group in parameter_groups(module):
        if type(group) in (FSDPParamGroup, TimedParamGroup, TimedParamGroupOnCPU):  # leave other subclasses alone
            runs_async = DEVICE_TRAITS[group.device.type].runs_async
            group.__class__ = TimedParamGroup if runs_async else TimedParamGroupOnCPU
            group.axis = axis  # pyrefly: ignore[missing-attribute]
