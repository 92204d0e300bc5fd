"""Heartbeats of ranks, in memory that the supervisor of a node shares with its ranks.

Times are of the machine's monotonic clock, which all its processes share. A write is a few machine words, without a
lock.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from typing import Literal

Section = Literal["start", "first", "step", "save", "evaluation", "finish", "data", "compile"]
SECTIONS: tuple[Section, ...] = ("start", "first", "step", "save", "evaluation", "finish", "data", "compile")
# start: from the fork to the first batch; first: the first two steps, in which code is compiled; data: waiting for the
# next batch; finish: after the last step; compile: within a later step
ROW = struct.Struct("=QQddQ")  # section, step, entered, alive, answered
REQUEST = struct.Struct("=Q")  # the number of the last report request
HEADER_BYTES = 64
ROW_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The state of a rank. `entered` is when its loop entered this section or step, `alive` when its heartbeat thread
    last ran. `answered` is the last report request that the thread has answered, see `request_reports`."""

    section: Section
    step: int
    entered: float
    alive: float
    answered: int


class HeartbeatBoard:
    """A row for each local rank in shared memory. The supervisor creates it and passes `fd` to its ranks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size)

    @classmethod
    def make(cls, num_ranks: int) -> "HeartbeatBoard":
        fd = os.memfd_create("trimaran-heartbeat")
        os.ftruncate(fd, HEADER_BYTES + ROW_BYTES * num_ranks)
        return cls(fd)

    def clear(self) -> None:
        """Reset all rows for new ranks, which are in section `start` from now on."""
        now = time.monotonic()
        for local_rank in range((len(self._memory) - HEADER_BYTES) // ROW_BYTES):
            ROW.pack_into(self._memory, HEADER_BYTES + ROW_BYTES * local_rank, 0, 0, now, now, self.request)

    def enter(self, local_rank: int, section: Section, step: int) -> None:
        """Write that the rank's loop has entered `section` of `step`. For the rank's main thread."""
        start = HEADER_BYTES + ROW_BYTES * local_rank
        struct.pack_into("=QQd", self._memory, start, SECTIONS.index(section), step, time.monotonic())

    def beat(self, local_rank: int, *, answered: int) -> None:
        """Write that the rank's heartbeat thread runs, and which report request it has answered."""
        start = HEADER_BYTES + ROW_BYTES * local_rank + 24
        struct.pack_into("=dQ", self._memory, start, time.monotonic(), answered)

    def read(self, local_rank: int) -> Heartbeat:
        section, step, entered, alive, answered = ROW.unpack_from(self._memory, HEADER_BYTES + ROW_BYTES * local_rank)
        return Heartbeat(section=SECTIONS[section], step=step, entered=entered, alive=alive, answered=answered)

    @property
    def request(self) -> int:
        """The number of the supervisor's last report request."""
        return REQUEST.unpack_from(self._memory, 0)[0]

    def request_reports(self) -> int:
        """Request a rank report (stacks and collectives) from all heartbeat threads; return the request's number."""
        REQUEST.pack_into(self._memory, 0, self.request + 1)
        return self.request
