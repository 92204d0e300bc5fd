"""Finds copies of the state in the memory of all nodes, and sends their shares to the ranks that need them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.checkpoint.memory_copies import (
    MemorySource,
    RankMemory,
    SlotContents,
    decode_contents,
    encode_contents,
    index_of,
)
from trimaran.checkpoint.rank_layout import RankLayout, barrier
from trimaran.parallel.comm.json_exchange import all_gather_int64, all_gather_json
from trimaran.parallel.tensor_regions import TensorIndex, overlap
from trimaran.parallel.tensor_shards import TensorShard

CopyKey = tuple[tuple[int, int], int, int]
"""Incarnation, step and world size: slots with the same key belong to the same copy of the state."""
CHUNK_BYTES = 64 << 20


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


class CopyFetcher:
    """The shares of a step: those of this node, and only headers of the others until `fetch`. All ranks make one."""

    def __init__(self, finder: CopyFinder, copies: Sequence[FoundCopy], rank_layout: RankLayout) -> None:
        self._rank_layout = rank_layout
        self._sender: dict[int, int] = {}
        """By the rank of a share, the rank that sends it to nodes without it."""
        for copy in sorted(copies, key=lambda each: (each.rank, each.reader)):
            self._sender.setdefault(copy.rank, copy.reader)
        local = {copy.rank: finder.contents(copy) for copy in copies if copy.node == rank_layout.node}
        self._local = {rank: local[rank] for rank in sorted(local)}
        nodes_with = {rank: {copy.node for copy in copies if copy.rank == rank} for rank in self._sender}
        self._to_send = [rank for rank, nodes in nodes_with.items() if nodes != set(rank_layout.nodes)]
        """The shares that some node does not have."""
        mine = {
            rank: encode_contents(self._local[rank]) for rank in self._to_send if self._sender[rank] == rank_layout.rank
        }
        headers = all_gather_json(mine) if self._to_send else []
        received = {int(rank): decode_contents(text) for row in headers for rank, text in row.items()}
        self._remote = {rank: contents for rank, contents in received.items() if rank not in local}

    @property
    def index(self) -> TensorIndex:
        return index_of({rank: contents.share for rank, contents in (self._local | self._remote).items()})

    def fetch(self, shards: Sequence[TensorShard]) -> MemorySource:
        """Return a source with all values that `shards` need. Every rank must call it."""
        if self._to_send:
            wanted = np.array(
                [rank in self._remote and _overlaps(self._remote[rank], shards) for rank in self._to_send]
            )
            for column, receivers in enumerate(all_gather_int64(wanted).T):
                for receiver in np.flatnonzero(receivers):
                    self._transfer(self._to_send[column], int(receiver))
        return MemorySource(self._local | self._remote)

    def _transfer(self, rank: int, receiver: int) -> None:
        """Send the share of `rank` to `receiver`. All ranks do this in the same order, so that they do not deadlock."""
        if self._rank_layout.rank == self._sender[rank]:
            for chunk in self._local[rank].memory.split(CHUNK_BYTES):
                dist.send(chunk, dst=receiver)
        if self._rank_layout.rank == receiver:
            contents = self._remote[rank]
            memory = torch.empty(contents.share.num_bytes, dtype=torch.uint8)
            for chunk in memory.split(CHUNK_BYTES):
                dist.recv(chunk, src=self._sender[rank])
            self._remote[rank] = _verified(contents, memory)


def open_node_copy(fds: Sequence[int], rank_layout: RankLayout, key: CopyKey) -> MemorySource | None:
    """Return the copy with this key in the memory of the only node; None if it is not complete.

    Every rank must call it, after it has committed its slot. Checksums are not verified.
    """
    barrier()  # until all ranks have
    finder = CopyFinder([RankMemory(fd) for fd in fds], rank_layout)
    copies = finder.copies(key)
    return CopyFetcher(finder, copies, rank_layout).fetch([]) if copies else None


def _verified(contents: SlotContents, memory: Tensor) -> SlotContents:
    """Return the contents with the memory that was received."""
    received = SlotContents(metadata=contents.metadata, share=contents.share, memory=memory, checksum=contents.checksum)
    if not received.verify():
        raise RuntimeError(f"the share of rank {contents.metadata.rank} was damaged on its way from another node")
    return received


def _overlaps(contents: SlotContents, shards: Sequence[TensorShard]) -> bool:
    by_key = {shard.key: [] for shard in shards}
    for shard in shards:
        by_key[shard.key].append(shard)
    return any(
        overlap(item.start, item.size, shard.start, tuple(shard.tensor.shape)) is not None
        for item in contents.share.items
        for shard in by_key.get(item.key, ())
    )
