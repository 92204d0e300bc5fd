"""Finds the complete copies of the state in the memory of all nodes."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.checkpoint.memory_copies import RankMemory, SlotContents
from trimaran.checkpoint.rank_layout import RankLayout
from trimaran.parallel.comm.json_exchange import all_gather_int64, all_gather_json

CopyKey = tuple[tuple[int, int], int, int]
"""Incarnation, step and world size: slots with the same key belong to the same copy of the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCopy:
    """A valid slot in a rank memory of `node`, read by rank `reader`. It holds the share that `rank` had then."""

    node: int
    reader: int
    rank_memory: int
    slot: int
    rank: int


class CopyFinder:
    """The complete copies in memory. Every rank must make one; they are equal on all ranks."""

    def __init__(self, rank_memories: Sequence[RankMemory], rank_layout: RankLayout) -> None:
        self._rank_memories, self._rank_layout = rank_memories, rank_layout
        rows = [
            [[*metadata.incarnation], metadata.step, metadata.world_size, number, index, metadata.rank]
            for number in range(rank_layout.local_rank, len(rank_memories), rank_layout.local_size)
            for index, slot in enumerate(rank_memories[number].slots)
            if (contents := slot.read()) is not None and (metadata := contents.metadata)
        ]
        self._found: dict[CopyKey, list[FoundCopy]] = defaultdict(list)
        for reader, rank_rows in enumerate(all_gather_json(rows)):
            for (attempt, num_rewinds), step, world_size, rank_memory, index, rank in rank_rows:
                copy = FoundCopy(
                    node=rank_layout.nodes[reader], reader=reader, rank_memory=rank_memory, slot=index, rank=rank
                )
                self._found[(attempt, num_rewinds), step, world_size].append(copy)

    def complete_copies(self) -> Iterator[CopyKey]:
        """Yield the keys of the complete copies, newest incarnation first, then newest step first."""
        yield from sorted((key for key, copies in self._found.items() if _is_complete(key, copies)), reverse=True)

    def copies(self, key: CopyKey) -> list[FoundCopy]:
        """Return the slots of a copy, whose checksums are not verified; none if the copy is not complete."""
        copies = self._found.get(key, [])
        return copies if _is_complete(key, copies) else []

    def verify(self, key: CopyKey) -> list[FoundCopy] | None:
        """Return the slots of a copy whose checksums are right; None if they do not make it complete.

        Every rank must call it.
        """
        copies = self._found[key]
        mine = np.array(
            [each.reader == self._rank_layout.rank and self.contents(each).verify() for each in copies], dtype=int
        )
        is_valid = all_gather_int64(mine).max(axis=0)
        valid = [each for each, good in zip(copies, is_valid, strict=True) if good]
        return valid if _is_complete(key, valid) else None

    def contents(self, copy: FoundCopy) -> SlotContents:
        """Return the contents of a slot on this node."""
        contents = self._rank_memories[copy.rank_memory].slots[copy.slot].read()
        assert contents is not None, f"{copy} has changed since it was found"
        return contents


def _is_complete(key: CopyKey, copies: Sequence[FoundCopy]) -> bool:
    return {each.rank for each in copies} == set(range(key[2]))
