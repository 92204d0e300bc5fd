"""Keeps a rank's copies on a second node too, and fetches copies from the memory of all nodes after a restart.

The nodes form a ring, and each stores the copies of the node before it.

A round sends the slots of one step around. It ends when all ranks have committed what they received, so the step of the
last round is complete even if a node is lost. The slot that was sent stays unchanged until the next round has ended.
A lost node costs at most the steps of two rounds. Rounds follow each other as fast as the network allows without
delaying training: with every copy if a round is shorter than a step, else as many steps apart as the last round took,
plus a fifth.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.checkpoint.memory_copies import (
    MemorySlot,
    MemorySource,
    RankMemory,
    SlotContents,
    checksum,
    decode_contents,
    encode_contents,
    encode_items,
    index_of,
)
from trimaran.checkpoint.rank_layout import RankLayout, barrier
from trimaran.parallel import TensorIndex, TensorShard, all_gather_int64, all_gather_json, overlap
from trimaran.runs import closed_listeners

CHUNK_BYTES = 64 << 20
FIRST_INTERVAL_STEPS = 2
INTERVAL_PER_ROUND = 1.2  # the time between two rounds over the time that the last one took: rounds must not queue up
CopyKey = tuple[tuple[int, int], int, int]
"""Incarnation, step and world size: slots with the same key belong to the same copy of the state."""


class PeerCopies:
    """Sends slots to the next node and fills `peer_slots` from the node before. Every rank makes one.

    All ranks must call `offer` with the same steps.
    """

    def __init__(
        self, rank_layout: RankLayout, peer_slots: Sequence[MemorySlot], wait_committed: Callable[[], None]
    ) -> None:
        """`wait_committed` returns when the slot that was copied to last is committed."""
        with closed_listeners():
            self._group: Any = dist.new_group(backend="gloo")
        self._next_rank = (rank_layout.rank + rank_layout.local_size) % rank_layout.world_size
        self._previous_rank = (rank_layout.rank - rank_layout.local_size) % rank_layout.world_size
        self._peer_slots, self._wait_committed = list(peer_slots), wait_committed
        self._next_step, self.interval_steps = 0, FIRST_INTERVAL_STEPS  # from one round to the next, at least
        self._sending: MemorySlot | None = None
        self._sent: MemorySlot | None = None
        self.num_rounds = 0
        self._failure: BaseException | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._queue: SimpleQueue[tuple[MemorySlot, float] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="trimaran-peer", daemon=True).start()

    @property
    def in_use(self) -> list[MemorySlot]:
        """The slots that must not be overwritten: the one being sent, and the one that was sent last."""
        return [slot for slot in (self._sending, self._sent) if slot is not None]

    def begin(self, step: int) -> None:
        """Start over after `step` steps: nothing that was sent before counts."""
        self.wait()
        self._sending = self._sent = None
        self._next_step, self.interval_steps = step, FIRST_INTERVAL_STEPS

    def offer(self, step: int, slot: MemorySlot, *, step_seconds: float) -> None:
        """Send `slot` if it is due, which is decided alike on all ranks from the duration of the round before last.

        `step_seconds` is the current duration of a step, 0.0 before the first.
        """
        if step < self._next_step:
            return
        self.wait()
        self._next_step = step + self.interval_steps
        self._sending = slot
        self._idle.clear()
        self._queue.put((slot, step_seconds))

    def wait(self) -> None:
        """Return when the last round has ended."""
        self._idle.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread. No round may follow."""
        self._queue.put(None)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            slot, step_seconds = task
            try:
                self._wait_committed()
                self._round(slot, step_seconds)
            except Exception as error:  # `wait` raises it in the training thread
                self._failure = error
            self._idle.set()

    def _round(self, slot: MemorySlot, step_seconds: float) -> None:
        began = time.monotonic()
        contents = slot.read()
        assert contents is not None, "an invalid slot was offered"
        text = np.frombuffer(encode_contents(contents).encode(), dtype=np.uint8).copy()
        sizes = torch.tensor([len(text), len(contents.memory)])
        incoming_sizes = torch.zeros_like(sizes)
        self._exchange(sizes, incoming_sizes)
        header_bytes, data_bytes = map(int, incoming_sizes)
        header = torch.empty(header_bytes, dtype=torch.uint8)
        self._exchange(torch.from_numpy(text), header)
        oldest = self._peer_slots[0]
        oldest.invalidate()
        self._exchange(contents.memory, oldest.data[:data_bytes])
        received = decode_contents(header.numpy().tobytes().decode())
        if checksum(oldest.data[:data_bytes]) == received.checksum:
            oldest.commit(received.metadata, encode_items(received.share.items), data_bytes)
        slowest = torch.tensor([time.monotonic() - began, -step_seconds])
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        self._peer_slots.reverse()
        self._sent, self._sending = slot, None
        round_seconds, shortest_step_seconds = float(slowest[0]), -float(slowest[1])
        if shortest_step_seconds > 0:
            self.interval_steps = max(1, math.ceil(INTERVAL_PER_ROUND * round_seconds / shortest_step_seconds))
        self.num_rounds += 1

    def _exchange(self, ours: Tensor, theirs: Tensor) -> None:
        """Send `ours` to the next node while `theirs` is received from the node before."""
        sends = [dist.isend(chunk, dst=self._next_rank, group=self._group) for chunk in ours.split(CHUNK_BYTES)]
        receives = (
            dist.irecv(chunk, src=self._previous_rank, group=self._group) for chunk in theirs.split(CHUNK_BYTES)
        )
        for work in chain(receives, sends):
            if work is not None:
                work.wait()


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
            node = rank_layout.nodes[reader]
            for (attempt, num_rewinds), step, world_size, rank_memory, index, rank in rank_rows:
                copy = FoundCopy(node=node, reader=reader, rank_memory=rank_memory, slot=index, rank=rank)
                self._found[(attempt, num_rewinds), step, world_size].append(copy)

    def complete_copies(self) -> Iterator[CopyKey]:
        """Yield the keys of the complete copies, newest incarnation first, then newest step first."""
        yield from sorted((key for key, copies in self._found.items() if _is_complete(key, copies)), reverse=True)

    def copies(self, key: CopyKey) -> list[FoundCopy]:
        """Return the slots of a copy, whose checksums are not verified; none if the copy is not complete."""
        copies = self._found.get(key, [])
        return copies if _is_complete(key, copies) else []

    def verify(self, key: CopyKey) -> list[FoundCopy] | None:
        """Return the slots with right checksums; None if they make no complete copy. Every rank must call it."""
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
        self._sender: dict[int, int] = {}  # by the rank of a share, the rank that sends it to nodes without it
        for copy in sorted(copies, key=lambda each: (each.rank, each.reader)):
            self._sender.setdefault(copy.rank, copy.reader)
        local = {copy.rank: finder.contents(copy) for copy in copies if copy.node == rank_layout.node}
        self._local = {rank: local[rank] for rank in sorted(local)}
        nodes_with = {rank: {copy.node for copy in copies if copy.rank == rank} for rank in self._sender}
        self._to_send = [rank for rank, nodes in nodes_with.items() if nodes != set(rank_layout.nodes)]
        """The shares that some node does not have."""
        own = [rank for rank in self._to_send if self._sender[rank] == rank_layout.rank]
        mine = {rank: encode_contents(self._local[rank]) for rank in own}
        headers = all_gather_json(mine) if self._to_send else []
        received = {int(rank): decode_contents(text) for row in headers for rank, text in row.items()}
        self._remote = {rank: contents for rank, contents in received.items() if rank not in local}

    @property
    def index(self) -> TensorIndex:
        return index_of({rank: contents.share for rank, contents in (self._local | self._remote).items()})

    def fetch(self, shards: Sequence[TensorShard]) -> MemorySource:
        """Return a source with all values that `shards` need. Every rank must call it."""
        if self._to_send:
            by_key: dict[str, list[TensorShard]] = defaultdict(list)
            for shard in shards:
                by_key[shard.key].append(shard)
            needed = {
                rank
                for rank, contents in self._remote.items()
                for item in contents.share.items
                for shard in by_key.get(item.key, ())
                if overlap(item.start, item.size, shard.start, tuple(shard.tensor.shape)) is not None
            }
            wanted = np.array([rank in needed for rank in self._to_send])
            for column, receivers in enumerate(all_gather_int64(wanted).T):
                rank = self._to_send[column]
                for receiver in np.flatnonzero(receivers).tolist():  # in the same order on all ranks: no deadlock
                    if self._rank_layout.rank == self._sender[rank]:
                        for chunk in self._local[rank].memory.split(CHUNK_BYTES):
                            dist.send(chunk, dst=receiver)
                    if self._rank_layout.rank == receiver:
                        contents = self._remote[rank]
                        memory = torch.empty(contents.share.num_bytes, dtype=torch.uint8)
                        for chunk in memory.split(CHUNK_BYTES):
                            dist.recv(chunk, src=self._sender[rank])
                        self._remote[rank] = replace(contents, memory=memory)
                        if not self._remote[rank].verify():
                            raise RuntimeError(f"the share of rank {rank} was damaged on its way from another node")
        return MemorySource(self._local | self._remote)


def open_node_copy(fds: Sequence[int], rank_layout: RankLayout, key: CopyKey) -> MemorySource | None:
    """Return the unverified copy of a key on the only node; None if incomplete. Every rank calls it once committed."""
    barrier()  # until all ranks have
    finder = CopyFinder([RankMemory(fd) for fd in fds], rank_layout)
    copies = finder.copies(key)
    return CopyFetcher(finder, copies, rank_layout).fetch([]) if copies else None
