"""Which rank holds what: the device mesh, the pipeline stages, and the settings of single towers."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trimaran.core import DEVICE_TRAITS, DeviceTraits, Mesh, Plan, Recompute, Sharding
from trimaran.models import stages_of_rank
from trimaran.nets import ImageAssignment, Network, refuse_unknown_tower, tower_of


@dataclass(frozen=True)
class RankMesh:
    """The process groups of a rank. All views share one root mesh, so a parameter can be sharded over several views.

    Mesh dims are ordered by traffic: tensor-parallel ranks are adjacent, then context parallelism, shards, replicas and
    stages. Experts use the inner `ep` of the data ranks and are sharded over the rest.
    """

    degrees: Mesh
    axes: DeviceMesh  # pp, dp_replicate, dp_shard, cp, tp
    shards: DeviceMesh  # dp_replicate, shard: parameters are sharded over dp_shard and cp together
    data: DeviceMesh  # all ranks with different tokens: gradients are reduced over them
    experts: DeviceMesh  # expert_replicate, expert_shard, ep, tp
    world: DeviceMesh | None = None  # all ranks in one dim, of which the others are views
    without_device: bool = False  # tensors stay on the meta device: the rank is only built, see train/fake_ranks.py

    def rank(self, axis: str) -> int:
        """Return this rank's coordinate along a mesh dim of `axes`."""
        return self._coordinates[axis]

    @cached_property
    def _coordinates(self) -> dict[str, int]:
        """This rank's coordinates by mesh dim. Every step needs some, and torch takes 30 us to find one."""
        return {axis: self.axes.get_local_rank(axis) for axis in self.axes.mesh_dim_names or ()}

    @cached_property
    def shards_and_tp(self) -> DeviceMesh:
        """Replicas, and shards also over tp ranks, which split images. Created, by all ranks, at the first use."""
        assert self.world is not None
        mesh = self.degrees
        named = {"pp": mesh.pp, "dp_replicate": mesh.dp_replicate, "shard_and_tp": mesh.shards * mesh.tp}
        view = self.world._unflatten(0, tuple(named.values()), tuple(named))
        return view["dp_replicate", "shard_and_tp"]

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.axes.get_group(axis)

    @cached_property
    def device(self) -> torch.device:
        """The device that this rank computes on. Offloaded weights are on the CPU."""
        kind = self.axes.device_type
        if self.device_traits.shares_cores:
            return torch.device(kind)
        return torch.device(kind, torch.cuda.current_device())

    @cached_property
    def device_traits(self) -> DeviceTraits:
        return DEVICE_TRAITS[self.axes.device_type]

    @cached_property
    def data_rank(self) -> int:
        return self.rank("dp_replicate") * self.degrees.dp_shard + self.rank("dp_shard")

    def dropout_seed(self, seed: int, step: int = 0) -> int:
        """Return this rank's random seed of a step, also after a resume; tp ranks must drop the same elements."""
        return int.from_bytes(blake2b(f"{seed}/{step}/{self._position}".encode(), digest_size=8).digest()) >> 1

    @cached_property
    def _position(self) -> int:
        """This rank's number among the ranks that drop different elements."""
        return self.rank("pp") * self.degrees.data + self.data.get_local_rank()

    def reseed(self, seed: int, step: int) -> None:
        """Seed this rank's random number generators for a step."""
        number = self.dropout_seed(seed, step)
        # `torch.manual_seed` also records a traceback for lazy CUDA initialization, which takes 180 us.
        torch.default_generator.manual_seed(number)
        if self.device_traits.has_own_generator:
            torch.cuda.manual_seed(number)

    @cached_property
    def counts_samples(self) -> bool:
        """Whether this rank counts its samples. The other tp, cp and pp ranks have the same samples and do not."""
        return self.rank("tp") == self.rank("cp") == self.rank("pp") == 0


def build_mesh(mesh: Mesh, *, device_type: str) -> RankMesh:
    """Return the mesh of all ranks. The process group must be initialized."""
    # torch warns about every tensor that is gathered over two mesh dims, which happens when a checkpoint is saved.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    world = init_device_mesh(device_type, (mesh.world_size,), mesh_dim_names=("world",))

    def view(**degrees: int) -> DeviceMesh:
        named = {"pp": mesh.pp, **degrees, "tp": mesh.tp}
        return world._unflatten(0, tuple(named.values()), tuple(named))

    # With sharding, experts stay within a shard group; without, they may use all data ranks.
    outer, inner = (mesh.dp_replicate, mesh.dp_shard * mesh.cp) if mesh.dp_shard > 1 else (1, mesh.data)
    return RankMesh(
        degrees=mesh,
        axes=view(dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, cp=mesh.cp),
        shards=view(dp_replicate=mesh.dp_replicate, shard=mesh.dp_shard * mesh.cp)["dp_replicate", "shard"],
        data=view(data=mesh.data)["data"],
        experts=view(expert_replicate=outer, expert_shard=inner // mesh.ep, ep=mesh.ep),
        world=world,
    )


def forget_meshes() -> None:
    """Clear torch's caches of what it knows about DTensors: two meshes of the same ranks are equal, as cache keys."""
    from torch.distributed.tensor import _redistribute, debug  # noqa: PLC0415  see `nets.local_shards.is_dtensor`; private in torch

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


SHARDING_ATTRIBUTE = "_trimaran_sharding"  # of the module of an FSDP unit


def tower_of_blocks(network: Network) -> list[tuple[str, nn.Module]]:
    """Return the network's blocks in order, each with its tower."""
    names = {id(module): name for name, module in network.module.named_modules()}
    return [(tower_of(names[id(block)], network.towers), block) for block in network.blocks]


def freeze_towers(network: Network, names: Iterable[str]) -> None:
    """Freeze these towers: no gradients and no optimizer state. Runs before the plan is applied."""
    frozen = set(names)
    for name in frozen:
        refuse_unknown_tower(name, network.towers, code="M012", where="model.freeze")
    for name, parameter in network.module.named_parameters():
        if tower_of(name, network.towers) in frozen:
            parameter.requires_grad_(False)


def sharding_of(tower: str, plan: Plan) -> Sharding:
    own = plan.towers.get(tower)
    return plan.sharding if own is None or own.sharding is None else own.sharding


def sharding_of_module(module: nn.Module, plan: Plan) -> Sharding:
    """Return the sharding of the FSDP unit of this module."""
    return getattr(module, SHARDING_ATTRIBUTE, plan.sharding)


def recompute_of(tower: str, plan: Plan) -> Recompute:
    own = plan.towers.get(tower)
    return plan.recompute if own is None or own.recompute is None else own.recompute


def tp_replicated_towers(network: Network, plan: Plan) -> list[str]:
    """Return the towers with tp 1 in a plan with tensor parallelism: their weights are replicated."""
    own = {name: tower.tp for name, tower in plan.towers.items()}
    return [tower for tower in network.towers if own.get(tower) == 1 < plan.mesh.tp]


def image_split_towers(network: Network, plan: Plan) -> list[str]:
    """Return replicated towers in which tp ranks encode different images, so that their gradients are partial."""
    replicated = tp_replicated_towers(network, plan)
    if "vision" not in replicated or not takes_images(network):
        return []
    return [tower for tower in ("vision", "projector") if tower in replicated]


def takes_images(network: Network) -> bool:
    return isinstance(getattr(network.module, "image_assignment", None), ImageAssignment)


@dataclass(frozen=True, slots=True)
class StageMap:
    """The stages of each pipeline rank: `here` are this rank's stages, `owners` the rank in `group` of each stage."""

    here: tuple[int, ...]
    owners: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def last(self) -> int:
        return len(self.owners) - 1

    @property
    def has_last(self) -> bool:
        return self.last in self.here


def map_stages(plan: Plan, ranks: RankMesh) -> StageMap:
    """Return the stage map; without a pipeline there is one stage."""
    stages_of = [
        stages_of_rank(plan.pipeline.schedule, plan.mesh.pp, pp_rank, plan.num_stages)
        for pp_rank in range(plan.mesh.pp)
    ]
    owners = {stage: pp_rank for pp_rank, stages in enumerate(stages_of) for stage in stages}
    here = stages_of[ranks.rank("pp")]
    return StageMap(here, tuple(owners[stage] for stage in range(plan.num_stages)), ranks.group("pp"))


@dataclass(frozen=True, slots=True)
class TrainedParameters:
    """The trained parameters of this rank by tower, some maybe empty, and those with partial gradients on tp ranks."""

    towers: Mapping[str, Sequence[nn.Parameter]]
    with_partial_gradient: Sequence[nn.Parameter] = ()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [each for parameters in self.towers.values() for each in parameters]


def trained_parameters(networks: Sequence[Network], plan: Plan) -> TrainedParameters:
    """Return the trained parameters of this rank, without the last stage's copy of a tied embedding."""
    towers = networks[0].towers  # FSDP reduces the gradients of sharded ones over the tensor-parallel ranks
    split_towers = [each for each in image_split_towers(networks[0], plan) if sharding_of(each, plan) == "none"]
    by_tower: dict[str, list[nn.Parameter]] = {tower: [] for tower in towers}
    for network in networks:
        copy = network.tied_embedding if network.holds_tied_copy else None
        for name, each in network.module.named_parameters():
            if each.requires_grad and each is not copy:
                by_tower[tower_of(name, towers)].append(each)
    return TrainedParameters(by_tower, [each for tower in split_towers for each in by_tower[tower]])
