"""Who the ranks are and on which nodes, and how they tell each other things: as tensors, never pickled."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Nodes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """This rank among all. `nodes` has, for each rank, the first rank of its node, which is the node's name."""

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
    """Return whether every rank has a partner: there are several nodes, all with as many ranks."""
    return rank_layout.num_nodes > 1 and len({rank_layout.nodes.count(node) for node in rank_layout.nodes}) == 1


def exchange_rank_layout(rank: int, local_rank: int) -> RankLayout:
    """Return the roster. Every rank calls it, once the process group is up."""
    nodes = gather_numbers(np.array([rank - local_rank], dtype=np.int64))[:, 0]
    return RankLayout(rank=rank, local_rank=local_rank, nodes=tuple(nodes.tolist()))


def gather_numbers(numbers: np.ndarray) -> np.ndarray:
    """Return the int64 `numbers` of every rank, a row for each. All ranks must have as many."""
    mine = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    if len(mine):
        dist.all_gather(rows, mine)
    return torch.stack(rows).numpy()


def gather_trees(tree: Any) -> list[Any]:
    """Return what every rank says, in plain data that JSON holds, by rank."""
    text = np.frombuffer(json.dumps(tree).encode(), dtype=np.uint8)
    lengths = gather_numbers(np.array([len(text)]))[:, 0]
    words = np.zeros(-(-int(lengths.max()) // 8), dtype=np.int64)
    words.view(np.uint8)[: len(text)] = text
    rows = gather_numbers(words).view(np.uint8)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def told_by_first(tree: Any) -> Any:
    """Return what rank 0 says; the others' `tree` is ignored."""
    text = np.frombuffer(json.dumps(tree).encode(), dtype=np.uint8).copy()
    length = torch.tensor([len(text)])
    dist.broadcast(length, src=0)
    letter = torch.zeros(int(length), dtype=torch.uint8)
    if dist.get_rank() == 0:
        letter = torch.from_numpy(text)
    dist.broadcast(letter, src=0)
    return json.loads(letter.numpy().tobytes())


def meet() -> None:
    """Return when all ranks have come here."""
    gather_numbers(np.zeros(1, dtype=np.int64))


def everyone(says: bool) -> bool:
    """Return whether all ranks say yes."""
    return bool(gather_numbers(np.array([says], dtype=np.int64)).all())
