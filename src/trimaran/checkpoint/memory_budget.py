"""How much host memory the copies of the state may take. Decided before the first step, equal on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.checkpoint.rank_layout import RankLayout, can_pair
from trimaran.core import CheckpointSection, UserError, show_bytes
from trimaran.hardware.host_limits import free_bytes
from trimaran.parallel.comm.json_exchange import all_gather_int64

MAX_FREE_MEMORY_FRACTION = 0.5
"""Of the memory that is free before the first step, copies may take this fraction. Training needs the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The slots of each rank: `own_slots` for its own copies, `peer_slots` for those of a rank on another node.

    With `keeps_copies` the slots hold copies to restore from. Without it a single slot only holds a checkpoint until
    it is on disk. With no slot the checkpoint waits in a file on its own disk, and training waits until it is written.
    """

    own_slots: int
    peer_slots: int = 0
    keeps_copies: bool = True

    @property
    def num_slots(self) -> int:
        return self.own_slots + self.peer_slots


NO_SLOTS = MemoryBudget(own_slots=0, keeps_copies=False)


def budget_options(section: CheckpointSection, *, has_rank_memory: bool, pairs: bool) -> list[MemoryBudget]:
    """Return the possible budgets, the best first; the last has no slots.

    `has_rank_memory`: copies are useful, since they can be restored from. `pairs`: each rank has a partner on another
    node.
    """
    # Without checkpoints nothing waits in a slot for the disk.
    last = [NO_SLOTS] if section.is_off else [MemoryBudget(own_slots=1, keeps_copies=False), NO_SLOTS]
    if not has_rank_memory or section.memory == 0:
        return last
    alone = [MemoryBudget(own_slots=count) for count in ((3, 2) if section.asynchronous else (2,))]
    # Two more slots cannot be overwritten: the one being sent to another node, and the one that was sent last.
    paired = [MemoryBudget(own_slots=each.own_slots + 2, peer_slots=2) for each in alone if pairs]
    return [*paired, *alone, *last]


def first_fitting_budget(
    options: Sequence[MemoryBudget], slot_bytes: Sequence[int], nodes: Sequence[int], free: Sequence[int]
) -> MemoryBudget:
    """Return the first of `options` for which every node has the memory; the last needs none.

    For each rank: the bytes of one of its slots, its node, and the free bytes of that node.
    """
    for option in options[:-1]:
        needs = {
            node: sum(size for size, each in zip(slot_bytes, nodes, strict=True) if each == node) for node in nodes
        }
        if all(
            option.num_slots * needs[node] <= MAX_FREE_MEMORY_FRACTION * has
            for node, has in zip(nodes, free, strict=True)
        ):
            return option
    return options[-1]


def choose_budget(
    section: CheckpointSection,
    rank_layout: RankLayout,
    *,
    slot_bytes: int,
    rank_memory_bytes: int,
    has_rank_memory: bool,
) -> MemoryBudget:
    """Return the memory budget for copies. Every rank must call it.

    `rank_memory_bytes` are allocated already and count as free. Raises UserError if the recipe demands copies in
    memory and they do not fit.
    """
    mine = np.array([slot_bytes, free_bytes(), rank_memory_bytes], dtype=np.int64)
    sizes, free, allocated = all_gather_int64(mine).T.tolist()
    nodes = rank_layout.nodes
    available = [
        has + sum(size for size, node in zip(allocated, nodes, strict=True) if node == here)
        for has, here in zip(free, nodes, strict=True)
    ]
    options = budget_options(section, has_rank_memory=has_rank_memory, pairs=can_pair(rank_layout) and has_rank_memory)
    budget = first_fitting_budget(options, sizes, nodes, available)
    if isinstance(section.memory, int) and section.memory > 0 and has_rank_memory and not budget.keeps_copies:
        needs = 2 * sum(size for size, node in zip(sizes, nodes, strict=True) if node == rank_layout.node)
        allowed = int(MAX_FREE_MEMORY_FRACTION * available[rank_layout.rank])
        raise UserError("K040", f"two copies of the state take {show_bytes(needs)} of this node's memory, "
                        f"they may take {show_bytes(allowed)}", where="checkpoint.memory",
                        fix="use more nodes, or let the run decide: --set checkpoint.memory=auto")  # fmt: skip
    return budget
