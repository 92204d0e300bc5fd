"""Which pipeline stages each rank holds, and what it trains. Without a pipeline there is one stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from trimaran.core import Plan
from trimaran.models.stages import stages_of_rank
from trimaran.nets import Network
from trimaran.nets.network import tower_of
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.tower_plan import image_split_towers, sharding_of


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
    """The trained parameters of this rank by tower, and those whose gradient is partial on each tp rank.

    All ranks have the same towers; some may be empty.
    """

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
