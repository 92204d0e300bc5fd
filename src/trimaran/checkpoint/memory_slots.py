"""The memory slots of a rank: how much host memory copies of the state may take, and which slot may be overwritten.

The budget is decided before the first step, equal on all ranks.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.checkpoint.memory_copies import MemorySlot, RankMemory
from trimaran.checkpoint.rank_layout import RankLayout, all_true, can_pair
from trimaran.core import CheckpointSection, UserError, show_bytes
from trimaran.machine.host_limits import free_bytes
from trimaran.parallel.comm.json_exchange import all_gather_int64
from trimaran.parallel.tensor_shards import RankShare

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


class SlotPool:
    """Slots used in turn. Every rank makes one. If a node turns out to lack the memory, `budget` has no slots.

    Without `allocate`, another thread calls `RankMemory.allocate` before a slot is used, and `release` if that fails.
    """

    def __init__(
        self, rank_memory: RankMemory, budget: MemoryBudget, *, num_bytes: int, items_bytes: int, allocate: bool = True
    ) -> None:
        self.rank_memory = rank_memory
        had_memory = True
        try:
            if budget.num_slots:
                rank_memory.create_slots(
                    budget.num_slots, num_bytes=num_bytes, items_bytes=items_bytes, allocate=allocate
                )
        except OSError:
            had_memory = False
        self.budget = budget if all_true(had_memory) else NO_SLOTS
        if not self.budget.num_slots:
            os.ftruncate(rank_memory.fd, 0)
        self.own_slots = rank_memory.slots[: budget.own_slots] if self.budget.num_slots else ()
        self.peer_slots = rank_memory.slots[budget.own_slots :] if self.budget.num_slots else ()
        self._steps: dict[MemorySlot, int] = {}
        self._mine: set[MemorySlot] = set()

    def clear_except(self, incarnation: tuple[int, int] | None, step: int, share: RankShare) -> None:
        """Invalidate all slots except those that hold the state of `step` of this incarnation.

        Of these, only slots with this rank's `share` count as its own copy: the ranks may have been others, with
        another sharding.
        """
        self._steps, self._mine = {}, set()
        for slot in (*self.own_slots, *self.peer_slots):
            contents = slot.read()
            if contents is None or (contents.metadata.incarnation, contents.metadata.step) != (incarnation, step):
                slot.invalidate()
            elif slot in self.own_slots:
                self._steps[slot] = step
                self._mine |= {slot} if contents.share == share else set()

    def release(self) -> None:
        """Continue without slots. All ranks must do this together: checkpoints then wait in a file on the disk."""
        self.budget, self.own_slots, self.peer_slots = NO_SLOTS, (), ()
        self._steps, self._mine = {}, set()
        os.ftruncate(self.rank_memory.fd, 0)

    def next_slot(self, busy: Collection[MemorySlot]) -> MemorySlot:
        """Return the slot to copy to: the one with the oldest state that is not in use."""
        return min((slot for slot in self.own_slots if slot not in busy), key=lambda slot: self._steps.get(slot, -1))

    def mark_filled(self, slot: MemorySlot, step: int) -> None:
        """Record that `slot` holds this rank's share of `step`."""
        self._steps[slot] = step
        self._mine.add(slot)

    def slot_of(self, step: int) -> MemorySlot | None:
        """Return the slot that holds this rank's share of the state of `step`."""
        return next((slot for slot, each in self._steps.items() if each == step and slot in self._mine), None)
