"""The ranks of a run and the nodes they are on."""

from dataclasses import dataclass

import numpy as np

from trimaran.parallel import all_gather_int64

Nodes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """This rank among all ranks. `nodes[r]` is the node of rank r; a node is identified by its first rank."""

    rank: int
    local_rank: int
    nodes: Nodes

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    @property
    def node(self) -> int:
        return self.nodes[self.rank]

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))

    @property
    def local_size(self) -> int:
        """How many ranks this node has."""
        return self.nodes.count(self.node)


def can_pair(rank_layout: RankLayout) -> bool:
    """Return whether every rank has a partner on another node: several nodes, all with the same number of ranks."""
    return rank_layout.num_nodes > 1 and len({rank_layout.nodes.count(node) for node in rank_layout.nodes}) == 1


def exchange_rank_layout(rank: int, local_rank: int) -> RankLayout:
    """Return the layout of all ranks. Every rank must call it, after the process group is initialised."""
    nodes = all_gather_int64(np.array([rank - local_rank], dtype=np.int64))[:, 0]
    return RankLayout(rank=rank, local_rank=local_rank, nodes=tuple(nodes.tolist()))


def barrier() -> None:
    """Return when every rank has called this. It runs on the CPU, unlike `dist.barrier` with NCCL."""
    all_gather_int64(np.zeros(1, dtype=np.int64))


def all_true(flag: bool) -> bool:
    """Return whether `flag` is true on every rank. Every rank must call it."""
    return bool(all_gather_int64(np.array([flag], dtype=np.int64)).all())
