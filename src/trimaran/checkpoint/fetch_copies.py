"""Brings the shares of one step together, from the memory of all nodes to where they are wanted."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.checkpoint.find_copies import CopyFinder, FoundCopy
from trimaran.checkpoint.memory_copies import MemorySource, SavedCopy, index_of, pack_kept, unpack_kept
from trimaran.checkpoint.rank_layout import RankLayout, gather_numbers, gather_trees
from trimaran.checkpoint.tensor_regions import Index, overlap
from trimaran.checkpoint.tensor_shards import TensorShard

CHUNK_BYTES = 64 << 20


class CopyFetcher:
    """The shares of a step: those of this node as they are, the others by name until `fetch`. All ranks make it."""

    def __init__(self, survey: CopyFinder, sound: Sequence[FoundCopy], rank_layout: RankLayout) -> None:
        self._rank_layout = rank_layout
        self._speaker: dict[int, int] = {}
        """By share, the rank that sends it to those who have none."""
        for seen in sorted(sound, key=lambda each: (each.rank, each.watcher)):
            self._speaker.setdefault(seen.rank, seen.watcher)
        here = {seen.rank: survey.kept(seen) for seen in sound if seen.node == rank_layout.node}
        self._here = {rank: here[rank] for rank in sorted(here)}
        nodes_with = {rank: {seen.node for seen in sound if seen.rank == rank} for rank in self._speaker}
        scarce = [rank for rank, nodes in nodes_with.items() if nodes != set(rank_layout.nodes)]
        said = {rank: pack_kept(self._here[rank]) for rank in scarce if self._speaker[rank] == rank_layout.rank}
        rows = gather_trees(said) if scarce else []
        self._away = {int(rank): unpack_kept(text) for row in rows for rank, text in row.items()}
        self._away = {rank: kept for rank, kept in self._away.items() if rank not in here}
        self._scarce = scarce

    @property
    def index(self) -> Index:
        return index_of({rank: kept.share for rank, kept in (self._here | self._away).items()})

    def fetch(self, pieces: Sequence[TensorShard]) -> MemorySource:
        """Return a source of what `pieces` want. Every rank calls it."""
        if self._scarce:
            wanted = np.array([rank in self._away and _touches(self._away[rank], pieces) for rank in self._scarce])
            for column, takers in enumerate(gather_numbers(wanted).T):
                for taker in np.flatnonzero(takers):
                    self._hand_over(self._scarce[column], int(taker))
        return MemorySource(self._here | self._away)

    def _hand_over(self, rank: int, taker: int) -> None:
        """Send the share of `rank` to `taker`. All do so in the same order, so nobody waits for ever."""
        if self._rank_layout.rank == self._speaker[rank]:
            for chunk in self._here[rank].memory.split(CHUNK_BYTES):
                dist.send(chunk, dst=taker)
        if self._rank_layout.rank == taker:
            kept = self._away[rank]
            memory = torch.empty(kept.share.num_bytes, dtype=torch.uint8)
            for chunk in memory.split(CHUNK_BYTES):
                dist.recv(chunk, src=self._speaker[rank])
            self._away[rank] = _arrived(kept, memory)


def _arrived(kept: SavedCopy, memory: Tensor) -> SavedCopy:
    arrived = SavedCopy(label=kept.label, share=kept.share, memory=memory, checksum=kept.checksum)
    if not arrived.verify():
        raise RuntimeError(f"the share of rank {kept.label.rank} was damaged on its way from another node")
    return arrived


def _touches(kept: SavedCopy, pieces: Sequence[TensorShard]) -> bool:
    held = {piece.key: [] for piece in pieces}
    for piece in pieces:
        held[piece.key].append(piece)
    return any(
        overlap(item.start, item.size, piece.start, tuple(piece.tensor.shape)) is not None
        for item in kept.share.items
        for piece in held.get(item.key, ())
    )
