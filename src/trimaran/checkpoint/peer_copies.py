"""Keeps a rank's copies on a second node too: the nodes form a ring, and each stores the copies of the node before it.

A round sends the slots of one step around. It ends when all ranks have committed what they received, so the step of the
last round is complete even if a node is lost. The slot that was sent stays unchanged until the next round has ended.
A lost node costs at most the steps of two rounds. Rounds follow each other as fast as the network allows without
delaying training: with every copy if a round is shorter than a step, else as many steps apart as the last round took,
plus a fifth.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.checkpoint.memory_copies import MemorySlot, checksum, decode_contents, encode_contents, encode_items
from trimaran.checkpoint.rank_layout import RankLayout
from trimaran.runs.gloo_listeners import closed_listeners

CHUNK_BYTES = 64 << 20
FIRST_INTERVAL_STEPS = 2
INTERVAL_PER_ROUND = 1.2
"""The time between two rounds over the time that the last one took: rounds must not queue up."""


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
        self._next_step, self._interval_steps = 0, FIRST_INTERVAL_STEPS
        self._sending: MemorySlot | None = None
        self._sent: MemorySlot | None = None
        self.num_rounds = 0
        self._failure: BaseException | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._queue: SimpleQueue[tuple[MemorySlot, float] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="trimaran-peer", daemon=True).start()

    @property
    def interval_steps(self) -> int:
        """The number of steps from one round to the next, at least."""
        return self._interval_steps

    @property
    def in_use(self) -> list[MemorySlot]:
        """The slots that must not be overwritten: the one being sent, and the one that was sent last."""
        return [slot for slot in (self._sending, self._sent) if slot is not None]

    def begin(self, step: int) -> None:
        """Start over after `step` steps: nothing that was sent before counts."""
        self.wait()
        self._sending = self._sent = None
        self._next_step, self._interval_steps = step, FIRST_INTERVAL_STEPS

    def offer(self, step: int, slot: MemorySlot, *, step_seconds: float) -> None:
        """Send `slot` if it is due, which is decided alike on all ranks from the duration of the round before last.

        `step_seconds` is the current duration of a step, 0.0 before the first.
        """
        if step < self._next_step:
            return
        self.wait()
        self._next_step = step + self._interval_steps
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
            self._interval_steps = max(1, math.ceil(INTERVAL_PER_ROUND * round_seconds / shortest_step_seconds))
        self.num_rounds += 1

    def _exchange(self, ours: Tensor, theirs: Tensor) -> None:
        """Send `ours` to the next node while `theirs` is received from the node before."""
        sends = [dist.isend(chunk, dst=self._next_rank, group=self._group) for chunk in ours.split(CHUNK_BYTES)]
        for chunk in theirs.split(CHUNK_BYTES):
            _wait(dist.irecv(chunk, src=self._previous_rank, group=self._group))
        for work in sends:
            _wait(work)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
