"""The board on which ranks show that they live: a page of memory that the supervisor of a node shares with its ranks.

Times are of the machine's monotonic clock, which all its processes share. A write is a few machine words; nobody locks.
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
# next batch; finish: after the last; compile: in the middle of a later step
ROW = struct.Struct("=QQddQ")  # section, step, entered, alive, answered
WORD = struct.Struct("=Q")
HEAD = 64
STRIDE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a rank showed last. `entered` is when its loop came to this section or step, `alive` when its heartbeat thread, a
    thread, last ran. `answered` is the last question that the heartbeat thread has answered, see `HeartbeatBoard.ask`."""

    section: Section
    step: int
    entered: float
    alive: float
    answered: int


class HeartbeatBoard:
    """Rows for `num_ranks` local ranks in shared memory. The supervisor makes one and hands `fd` down to its ranks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size)

    @classmethod
    def make(cls, num_ranks: int) -> "HeartbeatBoard":
        fd = os.memfd_create("trimaran-pulse")
        os.ftruncate(fd, HEAD + STRIDE * num_ranks)
        return cls(fd)

    def clear(self) -> None:
        """Start all rows anew, for new ranks: in section `start`, from now on."""
        now = time.monotonic()
        for place in range((len(self._memory) - HEAD) // STRIDE):
            ROW.pack_into(self._memory, HEAD + STRIDE * place, 0, 0, now, now, self.question)

    def enter(self, place: int, section: Section, step: int) -> None:
        """Show that the rank's loop has come to `section` of `step`. For the rank's main thread."""
        start = HEAD + STRIDE * place
        struct.pack_into("=QQd", self._memory, start, SECTIONS.index(section), step, time.monotonic())

    def live(self, place: int, *, answered: int) -> None:
        """Show that the rank's heartbeat thread runs, and which question it has answered."""
        struct.pack_into("=dQ", self._memory, HEAD + STRIDE * place + 24, time.monotonic(), answered)

    def read(self, place: int) -> Heartbeat:
        section, step, entered, alive, answered = ROW.unpack_from(self._memory, HEAD + STRIDE * place)
        return Heartbeat(section=SECTIONS[section], step=step, entered=entered, alive=alive, answered=answered)

    @property
    def question(self) -> int:
        """The number of the last question that the supervisor asked."""
        return WORD.unpack_from(self._memory, 0)[0]

    def ask(self) -> int:
        """Ask all witnesses to file their rank report: stacks, and what their collectives wait for."""
        WORD.pack_into(self._memory, 0, self.question + 1)
        return self.question
