"""This rank's place in an elastic run: its replica is a world of its own."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from trimaran.core import Plan, Recipe, UserError
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.data.data_kind import data_kind_of
from trimaran.runs.gloo_listeners import closed_listeners
from trimaran.train.process.rank_info import TIMEOUT, RankInfo
from trimaran.train.process.supervisor_link import SupervisorLink, supervisor_store

FIELD = "plan.comm.local_steps.elastic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A replica of `size` ranks, one of `num`. Its ranks are neighbours: the first is `first_rank` of the run."""

    number: int
    num: int
    size: int

    @property
    def first_rank(self) -> int:
        return self.number * self.size

    def rank_info(self, of_run: RankInfo) -> RankInfo:
        """Return the same rank, counted in this replica."""
        rank = of_run.rank - self.first_rank
        return replace(of_run, rank=rank, world_size=self.size, local_rank=min(rank, of_run.local_rank))

    def plan(self, of_run: Plan) -> Plan:
        """Return the plan of this replica alone: its mesh, and its part of the global batch."""
        mesh = of_run.mesh.model_copy(update={"dp_replicate": 1})
        return of_run.model_copy(update={"mesh": mesh})

    def recipe(self, of_run: Recipe) -> Recipe:
        """Return the recipe as the training loop of a replica follows it.

        Held-out samples are evaluated after synchronisations. There are no copies in memory: other replicas are copies.
        """
        evaluate = of_run.train.evaluate.model_copy(update={"every": 0})
        train = of_run.train.model_copy(update={"evaluate": evaluate})
        checkpoint = of_run.checkpoint.model_copy(update={"memory": 0})
        return of_run.model_copy(update={"train": train, "checkpoint": checkpoint})


def replica_of(plan: Plan, rank: int) -> Replica:
    """Return the replica of a rank of an elastic plan."""
    size = plan.mesh.world_size // plan.mesh.dp_replicate
    return Replica(number=rank // size, num=plan.mesh.dp_replicate, size=size)


def check_replica(recipe: Recipe, link: SupervisorLink) -> None:
    """Raise where elastic replicas cannot work."""
    if not link.store:
        raise _refusal("elastic replicas need Trimaran's supervisor, which decides who takes part",
                       "start the run with `trimaran train` or `trimaran launch`, or leave out elastic")  # fmt: skip
    if link.own_disk:
        raise _refusal("elastic replicas need a disk that all nodes share: another replica may save the checkpoint",
                       "use a shared disk, or leave out elastic")  # fmt: skip
    if (kind := data_kind_of(recipe)) != "text":
        raise _refusal(f"elastic replicas train on text, not on {kind}", "leave out elastic")
    if recipe.data.epochs:
        raise _refusal("data.epochs cannot be kept if replicas are lost: the steps that are left have fewer samples",
                       "set train.steps in place of data.epochs, or leave out elastic")  # fmt: skip


def _refusal(what: str, fix: str) -> UserError:
    return UserError("P003", what, where=FIELD, fix=fix)


def join_replica(replica: Replica, rank_info: RankInfo, link: SupervisorLink) -> None:
    """Initialise torch's default process group with the ranks of this replica. `rank_info` counts in the replica."""
    traits = DEVICE_TRAITS[rank_info.device.type]
    if traits.has_own_memory:
        torch.cuda.set_device(rank_info.device)
    prefix = f"replicas/world/{replica.number}/{link.replica_start}/"
    store = dist.PrefixStore(prefix, supervisor_store(link)) if replica.size > 1 else dist.HashStore()
    with closed_listeners():
        dist.init_process_group(
            traits.group_backends, store=store, rank=rank_info.rank, world_size=replica.size, timeout=TIMEOUT
        )
