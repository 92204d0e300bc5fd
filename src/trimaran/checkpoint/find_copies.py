"""Which steps are in the memory of the nodes, as all ranks see it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.checkpoint.memory_copies import RankMemory, SavedCopy
from trimaran.checkpoint.rank_layout import RankLayout, gather_numbers, gather_trees

Step = tuple[tuple[int, int], int, int]
"""Voyage, step and world size: all slots that say the same belong together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCopy:
    """A sealed slot in a rank memory of `node`; it holds the share that `rank` had then. `watcher` is who looked."""

    node: int
    watcher: int
    rank_memory: int
    slot: int
    rank: int


class CopyFinder:
    """What is in memory, complete steps only. Every rank makes one, and they are alike."""

    def __init__(self, rank_memories: Sequence[RankMemory], rank_layout: RankLayout) -> None:
        self._rank_memories, self._rank_layout = rank_memories, rank_layout
        rows = [
            [[*kept.label.incarnation], kept.label.step, kept.label.world_size, number, index, kept.label.rank]
            for number in range(rank_layout.local_rank, len(rank_memories), rank_layout.local_size)
            for index, slot in enumerate(rank_memories[number].slots)
            if (kept := slot.read()) is not None
        ]
        self._seen: dict[Step, list[FoundCopy]] = defaultdict(list)
        for watcher, tree in enumerate(gather_trees(rows)):
            for (attempt, laps), step, world_size, rank_memory, index, rank in tree:
                seen = FoundCopy(
                    node=rank_layout.nodes[watcher], watcher=watcher, rank_memory=rank_memory, slot=index, rank=rank
                )
                self._seen[(attempt, laps), step, world_size].append(seen)

    def steps(self) -> Iterator[Step]:
        """Yield the steps that are complete, the latest incarnation's newest first."""
        yield from sorted((step for step, seen in self._seen.items() if _is_whole(step, seen)), reverse=True)

    def verify(self, step: Step) -> list[FoundCopy] | None:
        """Return the slots of `step` whose values are what was sealed; None when they make no whole. All ranks call."""
        seen = self._seen[step]
        good = np.array(
            [each.watcher == self._rank_layout.rank and self.kept(each).verify() for each in seen], dtype=int
        )
        found = gather_numbers(good).max(axis=0)
        sound = [each for each, is_good in zip(seen, found, strict=True) if is_good]
        return sound if _is_whole(step, sound) else None

    def kept(self, seen: FoundCopy) -> SavedCopy:
        """Return the slot of a sighting on this node."""
        kept = self._rank_memories[seen.rank_memory].slots[seen.slot].read()
        assert kept is not None, f"{seen} has changed since it was seen"
        return kept


def _is_whole(step: Step, seen: Sequence[FoundCopy]) -> bool:
    return {each.rank for each in seen} == set(range(step[2]))
