"""The memory slots of one rank, and which of them may be overwritten."""

import os
from collections.abc import Collection

from trimaran.checkpoint.memory_budget import NO_SLOTS, MemoryBudget
from trimaran.checkpoint.memory_copies import MemorySlot, RankMemory
from trimaran.checkpoint.rank_layout import all_true
from trimaran.checkpoint.rank_share import RankShare


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
