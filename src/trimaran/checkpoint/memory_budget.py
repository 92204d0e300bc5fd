"""How much of a node's memory copies of the state may take. Decided before the first step, alike on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from trimaran.checkpoint.rank_layout import RankLayout, can_pair, gather_numbers
from trimaran.core import CheckpointSection, UserError, show_bytes

FREE_SHARE = 0.5
"""How much of the memory that is free before the first step copies may take: training itself wants some, too."""
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Slots of each rank: `own` for its copies, `foreign` for those of a rank on another node.

    With `memory` copies outlive their rank; without, a single slot is where a checkpoint waits to be written. No slot
    at all: it waits in a file on the disk that it is meant for, and training waits with it.
    """

    own: int
    foreign: int = 0
    memory: bool = True

    @property
    def num_slots(self) -> int:
        return self.own + self.foreign


def rooms(section: CheckpointSection, *, has_rank_memory: bool, pairs: bool) -> list[MemoryBudget]:
    """Return the ways to divide memory, the best first, the last with none at all.

    `has_berth`: copies are of use, since they outlive their rank. `pairs`: each rank has a partner on another node.
    """
    last = [MemoryBudget(own=1, memory=False), MemoryBudget(own=0, memory=False)]
    if not has_rank_memory or section.memory == 0:
        return last
    alone = [MemoryBudget(own=3), MemoryBudget(own=2)] if section.asynchronous else [MemoryBudget(own=2)]
    # Two more are not to be written to: one on its way to another node, and the one that got there last.
    paired = [MemoryBudget(own=room.own + 2, foreign=2) for room in alone if pairs]
    return [*paired, *alone, *last]


def first_that_fits(
    options: Sequence[MemoryBudget], slot_bytes: Sequence[int], nodes: Sequence[int], free: Sequence[int]
) -> MemoryBudget:
    """Return the first of `options` for which every node has the memory; the last wants none.

    For each rank: the bytes of one of its slots, its node, and the bytes that are free on that node.
    """
    for room in options[:-1]:
        needs = {
            node: sum(size for size, each in zip(slot_bytes, nodes, strict=True) if each == node) for node in nodes
        }
        if all(room.num_slots * needs[node] <= FREE_SHARE * has for node, has in zip(nodes, free, strict=True)):
            return room
    return options[-1]


def divide(
    section: CheckpointSection,
    rank_layout: RankLayout,
    *,
    slot_bytes: int,
    rank_memory_bytes: int,
    has_rank_memory: bool,
) -> MemoryBudget:
    """Return how much memory copies take. `berth_bytes` of it are taken already. Every rank calls it.

    Raises UserError when copies in memory were asked for by name and do not fit.
    """
    mine = np.array([slot_bytes, free_bytes(), rank_memory_bytes], dtype=np.int64)
    sizes, free, taken = gather_numbers(mine).T.tolist()
    nodes = rank_layout.nodes
    ready = [
        has + sum(size for size, node in zip(taken, nodes, strict=True) if node == here)
        for has, here in zip(free, nodes, strict=True)
    ]
    options = rooms(section, has_rank_memory=has_rank_memory, pairs=can_pair(rank_layout) and has_rank_memory)
    room = first_that_fits(options, sizes, nodes, ready)
    if isinstance(section.memory, int) and section.memory > 0 and has_rank_memory and not room.memory:
        needs = 2 * sum(size for size, node in zip(sizes, nodes, strict=True) if node == rank_layout.node)
        raise UserError("K040", f"two copies of the state take {show_bytes(needs)} of this node's memory, "
                        f"they may take {show_bytes(int(FREE_SHARE * ready[rank_layout.rank]))}", where="checkpoint.memory",
                        fix="use more nodes, or let the run decide: --set checkpoint.memory=auto")  # fmt: skip
    return room


def free_bytes(cgroup: Path = CGROUP) -> int:
    """Return how much memory this node has free, or its container where that has less."""
    free = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        counted = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        taken = int((cgroup / "memory.current").read_text()) - int(counted["file"]) + int(counted["shmem"])
    except (OSError, ValueError, KeyError):  # no container, or one without a limit: "max"
        return free
    return min(free, max(0, limit - taken))
