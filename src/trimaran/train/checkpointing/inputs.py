"""The arguments of a checkpointer: the run, the state of one rank, and the memory that its copies go to."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimaran.checkpoint.memory_copies import RankMemory
from trimaran.checkpoint.rank_layout import RankLayout, exchange_rank_layout
from trimaran.core import ModelSection, Plan, Recipe
from trimaran.models import model_folder
from trimaran.nets import Network
from trimaran.nets.local_shards import ReadTensor
from trimaran.parallel.axes.stage_map import StageMap
from trimaran.parallel.tensor_shards import CheckpointState
from trimaran.runs import Journal, RunDirectory
from trimaran.train.process.rank_setup import RankInfo
from trimaran.train.process.supervisor_link import SupervisorLink


class Base:
    """The frozen weights that an adapter is trained on, of which checkpoints hold a digest: here none.

    `is_apart`: there are such weights, and checkpoints do not hold them.
    """

    is_apart = False

    def known(self) -> dict[str, Any]:
        """Return the fields that name the base in a copy of the state; none while it is being hashed."""
        return {}

    def name(self) -> dict[str, Any]:
        """Return these fields once the base is hashed. Raises UserError if a file has changed since the start."""
        return {}

    def is_named_in(self, progress: Mapping[str, Any]) -> bool:
        """Return whether a saved state names its base. Every rank must call it; rank 0 decides for all."""
        return True

    def refuse_other(self, progress: Mapping[str, Any], report_progress: Callable[[], None]) -> None:
        """Raise UserError if a saved state names another base. Every rank must call it; rank 0 decides for all."""

    def reload(self) -> None:
        """Read the base again, in place."""

    def save_model(
        self,
        networks: Sequence[Network],
        folder: Path,
        section: ModelSection,
        *,
        rank: int,
        stages: StageMap,
        read: ReadTensor,
        add_files: Callable[[Path], None],
        report_progress: Callable[[], None],
    ) -> None:
        """Write what was trained to `folder`, see `save_network`. Every rank must call it."""
        from trimaran.checkpoint.convert.export_hf import save_network  # noqa: PLC0415  nothing needs it before the end

        save_network(
            networks,
            folder,
            rank=rank,
            stages=stages,
            origin=model_folder(section.path) if section.path else None,
            add_files=add_files,
            read=read,
            report_progress=report_progress,
        )

    def of_networks(self, reload: Callable[[], None]) -> "Base":
        """Return the same base for other networks, which `reload` reads it into."""
        return self


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
