"""Heartbeats of ranks, in memory that the supervisor of a node shares with its ranks.

Times are of the machine's monotonic clock, which all its processes share. A write is a few machine words, without a
lock; a reader sees all of them or none.
"""

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Section = Literal[
    "start",  # from the fork to the first batch, without what follows
    "first",  # the first two steps after a start
    "step",
    "save",  # unit: a piece of a checkpoint that is written to disk
    "evaluation",  # unit: a batch
    "finish",  # between the activities that follow the last step
    "data",  # waiting for the next batch, of training or of an evaluation
    "compile",  # unit: a graph; within any other section
    "prepare",  # unit: a chunk of a data file, or a part of a feature cache
    "load",  # unit: a tensor of the initial weights
    "restore",  # unit: a tensor or file of the saved state
    "copy",  # the state is copied to memory
    "export",  # unit: a tensor or file of the trained model
    "sampling",  # unit: a generated token
    "profile",  # a profiler is started, or writes what it recorded
    "search",  # a step is computed again to find where a NaN or Inf came from
    "close",  # after the last event
    "synchronise",  # an elastic replica waits for the others, or exchanges weights with them; unit: a moment of it
]
SECTIONS: tuple[Section, ...] = get_args(Section)
HEADER_WORDS = ROW_WORDS = 8  # 64 bytes, a cache line
REQUEST, FIRST_RANK = range(2)  # the words of the header
# The words of a row. `version` is odd while the next three are being written.
VERSION, SECTION, STEP, ENTERED, ALIVE, ANSWERED, SAVED = range(7)
WORD_BYTES = 8
MAX_READS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The state of a rank. `entered` is when it began this section or its last unit of progress, `alive` when its
    heartbeat thread last ran. `answered` is the last report request that the thread has answered, see
    `request_reports`. `saved`: the run's last step is done, and everything that must be saved is on disk."""

    section: Section
    step: int
    entered: float
    alive: float
    answered: int
    saved: bool = False


class HeartbeatBoard:
    """A row for each local rank in shared memory. The supervisor creates it and passes `fd` to its ranks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        memory = memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
        # Unlike `struct.pack_into`, which clears its target first, these write and read a word at once.
        self._words, self._times = memory.cast("Q"), memory.cast("d")
        self._last: dict[int, tuple[int, int, float]] = {}

    @classmethod
    def make(cls, num_ranks: int) -> "HeartbeatBoard":
        fd = os.memfd_create("trimaran-heartbeat")
        os.ftruncate(fd, WORD_BYTES * (HEADER_WORDS + ROW_WORDS * num_ranks))
        return cls(fd)

    def clear(self, local_ranks: Sequence[int] | None = None) -> None:
        """Reset the rows of these ranks, or of all, for new ones, which are in section `start` from now on."""
        now, request = time.monotonic(), self.request
        every = range(self.num_ranks)
        for local_rank in every if local_ranks is None else local_ranks:
            self._last.pop(local_rank, None)
            row = HEADER_WORDS + ROW_WORDS * local_rank
            self._times[row + ENTERED] = self._times[row + ALIVE] = now
            self._words[row + ANSWERED] = request
            for word in (SECTION, STEP, SAVED, VERSION):
                self._words[row + word] = 0

    def enter(self, local_rank: int, section: Section, step: int) -> None:
        """Write that the rank is in `section` after `step` steps, and has just made progress there."""
        row = HEADER_WORDS + ROW_WORDS * local_rank
        version = self._words[row + VERSION] | 1
        self._words[row + VERSION] = version
        self._words[row + SECTION] = SECTIONS.index(section)
        self._words[row + STEP] = step
        self._times[row + ENTERED] = time.monotonic()
        self._words[row + VERSION] = version + 1

    def beat(self, local_rank: int, *, answered: int) -> None:
        """Write that the rank's heartbeat thread runs, and which report request it has answered."""
        row = HEADER_WORDS + ROW_WORDS * local_rank
        self._times[row + ALIVE] = time.monotonic()
        self._words[row + ANSWERED] = answered

    def mark_saved(self, local_rank: int) -> None:
        """Write that this rank has finished the last step and saved everything that must be saved."""
        self._words[HEADER_WORDS + ROW_WORDS * local_rank + SAVED] = 1

    def read(self, local_rank: int) -> Heartbeat:
        """Return the heartbeat of a rank. If the rank is interrupted while it writes, return the one before."""
        row = HEADER_WORDS + ROW_WORDS * local_rank
        for _ in range(MAX_READS):
            version = self._words[row + VERSION]
            found = self._words[row + SECTION], self._words[row + STEP], self._times[row + ENTERED]
            if version % 2 == 0 and version == self._words[row + VERSION]:
                self._last[local_rank] = found
                break
        section, step, entered = self._last.get(local_rank, found)
        return Heartbeat(
            section=SECTIONS[section],
            step=step,
            entered=entered,
            alive=self._times[row + ALIVE],
            answered=self._words[row + ANSWERED],
            saved=bool(self._words[row + SAVED]),
        )

    @property
    def first_rank(self) -> int:
        """The rank in the first row: a reader that is not the supervisor knows which row is which rank."""
        return self._words[FIRST_RANK]

    @first_rank.setter
    def first_rank(self, rank: int) -> None:
        self._words[FIRST_RANK] = rank

    @property
    def num_ranks(self) -> int:
        return (len(self._words) - HEADER_WORDS) // ROW_WORDS

    @property
    def request(self) -> int:
        """The number of the supervisor's last report request."""
        return self._words[REQUEST]

    def request_reports(self) -> int:
        """Request a rank report (stacks and collectives) from all heartbeat threads; return the request's number."""
        self._words[REQUEST] = self.request + 1
        return self.request
