"""Sends the shares of one step from the nodes that hold them to the ranks that need them."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.checkpoint.find_copies import CopyFinder, CopyKey, FoundCopy
from trimaran.checkpoint.memory_copies import (
    MemorySource,
    RankMemory,
    SlotContents,
    decode_contents,
    encode_contents,
    index_of,
)
from trimaran.checkpoint.rank_layout import RankLayout, barrier
from trimaran.checkpoint.tensor_regions import TensorIndex, overlap
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.parallel.comm.json_exchange import all_gather_int64, all_gather_json

CHUNK_BYTES = 64 << 20


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
