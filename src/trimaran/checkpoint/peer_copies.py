"""Keeps a rank's copies on a second node as well: a ring of nodes, in which each keeps what the one before has.

A round sends one step around. It ends when all ranks have sealed what they got, so the step of the last round is whole
even when a node is lost. Until the next round has ended, the slot that was sent stays as it is: it belongs to it.
A lost node costs at most the steps of two rounds. Those follow each other as fast as the wire allows without making
training wait: with every copy when a round is quicker than a step, else as many steps apart as the last one took, and a
fifth more.
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

from trimaran.checkpoint.memory_copies import MemorySlot, checksum, pack_items, pack_kept, unpack_kept
from trimaran.checkpoint.rank_layout import RankLayout

CHUNK_BYTES = 64 << 20
FIRST_PACE = 2
SLACK = 1.2
"""How much longer than the last round the time until the next may be: rounds must not pile up."""


class PeerCopies:
    """Sends slots to the next node and fills `foreign` from the node before. All ranks make one, and offer alike."""

    def __init__(self, rank_layout: RankLayout, foreign: Sequence[MemorySlot], ready: Callable[[], None]) -> None:
        """`ready` returns when the slot that was copied to last is sealed."""
        self._group: Any = dist.new_group(backend="gloo")
        self._next_rank = (rank_layout.rank + rank_layout.local_size) % rank_layout.world_size
        self._rank_before = (rank_layout.rank - rank_layout.local_size) % rank_layout.world_size
        self._foreign, self._ready = list(foreign), ready
        self._due, self._every = 0, FIRST_PACE
        self._sending: MemorySlot | None = None
        self._sent: MemorySlot | None = None
        self.num_rounds = 0
        self._failure: BaseException | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._queue: SimpleQueue[tuple[MemorySlot, float]] = SimpleQueue()
        threading.Thread(target=self._work, name="trimaran-partner", daemon=True).start()

    @property
    def in_use(self) -> list[MemorySlot]:
        """The slots that nobody may write to: one on its way, and the one that got there last."""
        return [slot for slot in (self._sending, self._sent) if slot is not None]

    def begin(self, step: int) -> None:
        """Start anew after `step` steps: nothing that was sent before counts."""
        self.settle()
        self._sending = self._sent = None
        self._due, self._every = step, FIRST_PACE

    def offer(self, step: int, slot: MemorySlot, *, step_seconds: float) -> None:
        """Send `slot`, when it is time. What decides is the same on all ranks: what the round before last took.

        `step_seconds` is how long a step takes by now, 0.0 before the first.
        """
        if step < self._due:
            return
        self.settle()
        self._due = step + self._every
        self._sending = slot
        self._idle.clear()
        self._queue.put((slot, step_seconds))

    def settle(self) -> None:
        """Return when the last round has ended."""
        self._idle.wait()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while True:
            slot, step_seconds = self._queue.get()
            try:
                self._ready()
                self._round(slot, step_seconds)
            except Exception as error:  # for the thread that trains
                self._failure = error
            self._idle.set()

    def _round(self, slot: MemorySlot, step_seconds: float) -> None:
        began = time.monotonic()
        kept = slot.read()
        assert kept is not None, "a slot that is not sealed was offered"
        text = np.frombuffer(pack_kept(kept).encode(), dtype=np.uint8).copy()
        sizes = torch.tensor([len(text), len(kept.memory)])
        incoming = torch.zeros_like(sizes)
        self._exchange(sizes, incoming)
        letter = torch.empty(int(incoming[0]), dtype=torch.uint8)
        self._exchange(torch.from_numpy(text), letter)
        oldest = self._foreign[0]
        oldest.open()
        self._exchange(kept.memory, oldest.data[: int(incoming[1])])
        arrived = unpack_kept(letter.numpy().tobytes().decode())
        if checksum(oldest.data[: int(incoming[1])]) == arrived.checksum:
            oldest.seal(arrived.label, pack_items(arrived.share.items), int(incoming[1]))
        slowest = torch.tensor([time.monotonic() - began, -step_seconds])
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        self._foreign.reverse()
        self._sent, self._sending = slot, None
        seconds, quickest = float(slowest[0]), -float(slowest[1])
        if quickest > 0:
            self._every = max(1, math.ceil(SLACK * seconds / quickest))
        self.num_rounds += 1

    def _exchange(self, ours: Tensor, theirs: Tensor) -> None:
        """Send `ours` to the next node while `theirs` comes from the node before."""
        out = [dist.isend(chunk, dst=self._next_rank, group=self._group) for chunk in ours.split(CHUNK_BYTES)]
        for chunk in theirs.split(CHUNK_BYTES):
            _done(dist.irecv(chunk, src=self._rank_before, group=self._group))
        for work in out:
            _done(work)


def _done(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
