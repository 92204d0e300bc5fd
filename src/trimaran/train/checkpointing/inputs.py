"""The arguments of a checkpointer: the run, the state of one rank, and the memory that its copies go to."""

import os
from dataclasses import dataclass, field, replace
from typing import Any

from trimaran.checkpoint.memory_copies import RankMemory
from trimaran.checkpoint.rank_layout import RankLayout, exchange_rank_layout
from trimaran.checkpoint.tensor_shards import CheckpointState
from trimaran.core import Plan, Recipe
from trimaran.run import Journal, RunDirectory
from trimaran.train.checkpointing.base import Base
from trimaran.train.process.rank_info import RankInfo
from trimaran.train.process.supervisor_link import SupervisorLink


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInputs:
    """A rank of a run, and the state that it saves and restores.

    `data` is the digest of the training data. A state is restored only with the same data and the same base.
    """

    run: RunDirectory
    rank_info: RankInfo
    journal: Journal
    link: SupervisorLink
    state: CheckpointState
    recipe: Recipe
    plan: Plan
    data: str = ""
    base: Base = field(default_factory=Base)

    def progress(self) -> dict[str, Any]:
        """Return what is saved besides the tensors of the state."""
        data = {"data": self.data} if self.data else {}
        return {**self.state.progress(), **data, **self.base.known()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemories:
    """The memory for copies of the ranks that this one can read, by local rank, and its own.

    `layout` says which ranks are on which node. `shared_layout` does so for memory: without a supervisor, which owns
    the memory of a node, no rank can read that of another, as if each of them were a node.
    """

    layout: RankLayout
    shared_layout: RankLayout
    readable: tuple[RankMemory, ...]
    mine: RankMemory
    outlive_ranks: bool

    def read_again(self) -> "RankMemories":
        """Return the memories with the slots that other ranks have made in theirs meanwhile."""
        memories = tuple(RankMemory(each.fd) for each in self.readable)
        return replace(self, readable=memories, mine=memories[self.readable.index(self.mine)])


def find_memories(inputs: CheckpointInputs) -> RankMemories:
    """Return the memories of this rank's node. Every rank must call it."""
    rank, link = inputs.rank_info.rank, inputs.link
    layout = exchange_rank_layout(rank, inputs.rank_info.local_rank)
    if link.rank_memories:
        memories = tuple(RankMemory(fd) for fd in link.rank_memories)
        mine = memories[link.local_rank]
        return RankMemories(layout=layout, shared_layout=layout, readable=memories, mine=mine, outlive_ranks=True)
    mine = RankMemory(os.memfd_create("trimaran-rank-memory"))
    alone = RankLayout(rank=rank, local_rank=0, nodes=tuple(range(layout.world_size)))
    return RankMemories(layout=layout, shared_layout=alone, readable=(mine,), mine=mine, outlive_ranks=False)


@dataclass(slots=True)
class SaveTotals:
    """The cost of saving the state so far. A change of the plan goes on counting."""

    checkpoints: int = 0
    copies: int = 0
    stall_seconds: float = 0.0
    failed: int = 0
