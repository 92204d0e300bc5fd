"""The slots of one rank, and which of them may be written to."""

import os
from collections.abc import Collection

from trimaran.checkpoint.memory_budget import MemoryBudget
from trimaran.checkpoint.memory_copies import MemorySlot, RankMemory
from trimaran.checkpoint.rank_layout import everyone
from trimaran.checkpoint.rank_share import RankShare

NO_ROOM = MemoryBudget(own=0, memory=False)


class SlotPool:
    """Slots that take turns. Every rank makes one; when a node lacks the memory after all, `room` has none.

    Without `take` somebody else calls `rank memory.take` before a slot is used, and `give_up` where that fails.
    """

    def __init__(
        self, rank_memory: RankMemory, room: MemoryBudget, *, num_bytes: int, items_bytes: int, take: bool = True
    ) -> None:
        self.rank_memory = rank_memory
        had_memory = True
        try:
            if room.num_slots:
                rank_memory.lay_out(room.num_slots, num_bytes=num_bytes, items_bytes=items_bytes, take=take)
        except OSError:
            had_memory = False
        self.room = room if everyone(had_memory) else NO_ROOM
        if not self.room.num_slots:
            os.ftruncate(rank_memory.fd, 0)
        self.own = rank_memory.slots[: room.own] if self.room.num_slots else ()
        self.foreign = rank_memory.slots[room.own :] if self.room.num_slots else ()
        self._steps: dict[MemorySlot, int] = {}
        self._mine: set[MemorySlot] = set()

    def clear_but(self, incarnation: tuple[int, int] | None, step: int, share: RankShare) -> None:
        """Empty all slots, but for those that hold the state of `step` on this incarnation.

        Of those only slots with this rank's `share` count as held: the ranks may have been others, split in other ways.
        """
        self._steps, self._mine = {}, set()
        for slot in (*self.own, *self.foreign):
            kept = slot.read()
            if kept is None or (kept.label.incarnation, kept.label.step) != (incarnation, step):
                slot.open()
            elif slot in self.own:
                self._steps[slot] = step
                self._mine |= {slot} if kept.share == share else set()

    def give_up(self) -> None:
        """Do without slots. All ranks do, or none: what is written to disk from now on has no other place to wait."""
        self.room, self.own, self.foreign = NO_ROOM, (), ()
        self._steps, self._mine = {}, set()
        os.ftruncate(self.rank_memory.fd, 0)

    def next(self, busy: Collection[MemorySlot]) -> MemorySlot:
        """Return the slot to copy to: the one with the oldest state that is not in use."""
        return min((slot for slot in self.own if slot not in busy), key=lambda slot: self._steps.get(slot, -1))

    def fill(self, slot: MemorySlot, step: int) -> None:
        """Take note that `slot` is to hold the state of `step`."""
        self._steps[slot] = step
        self._mine.add(slot)

    def holding(self, step: int) -> MemorySlot | None:
        """Return the slot that holds this rank's share of the state of `step`."""
        return next((slot for slot, each in self._steps.items() if each == step and slot in self._mine), None)
