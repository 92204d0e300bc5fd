"""A process that loads batches for a rank.

`torch.utils.data.DataLoader` has such processes too. Ours differ in what a long run needs: a dead one is noticed at
its own pipe and named, not by a signal handler that raises wherever the trainer happens to be, and it can be replaced
without losing or repeating a batch, as can a hung one; they outlive the SIGTERM that asks a trainer to finish its step;
closing never waits for a hung one; no pickle and no /dev/shm is involved.

A step is asked for by its number through a pipe. Its arrays come back in a slot of shared memory, and through another
pipe a line of JSON that says where they lie. A process has two slots and owes two steps at most: while one is read out
it fills the other.
"""

import gc
import json
import mmap
import multiprocessing
import os
import signal
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from trimaran.data.feed import BadSample, LoadedArrays
from trimaran.data.shared_slot import SharedSlot

HEAD = struct.Struct("=?I")  # whether all is well, and the length of what follows: what there is to say, in JSON
STEP = struct.Struct("=q")
NUM_SLOTS = 2
NO_SAMPLE = -1
START_SECONDS = 5.0  # that a new process may need before it loads anything

Read = Callable[[int, Callable[[int], None]], LoadedArrays]
"""Return the work of a step, and tell the id of each sample before it is touched."""


class DeadWorkerError(Exception):
    """The process ended without being told to."""


class HungWorkerError(Exception):
    """The process lives and says nothing."""


class RaisedInWorkerError(Exception):
    """The code in the process raised; the message ends with the error, and before it comes its traceback."""


class Worker:
    """One forked process that loads the steps that it is asked for, in that order.

    `owed` are those that have not come back, and `since` is when it last said something, or was first asked to.
    """

    def __init__(self, read: Read, *, timeout_seconds: float, siblings: Sequence["Worker"]) -> None:
        self._allowance = timeout_seconds
        context = multiprocessing.get_context("fork")
        self.owed: deque[int] = deque()
        self.since = time.monotonic()
        self._received = 0
        self._slots = tuple(SharedSlot() for _ in range(NUM_SLOTS))
        # The sample that it is at, and when it began (monotonic clock, nanoseconds). It is memory that outlives the
        # process, to tell what it died of.
        self._at = np.frombuffer(mmap.mmap(-1, 2 * STEP.size), dtype=np.int64)
        self._at[0] = NO_SAMPLE
        self._answers, answers = context.Pipe(duplex=False)
        asked, self._asks = context.Pipe(duplex=False)
        arguments = (read, asked, answers, [self, *siblings])
        self._process = context.Process(target=self._run, args=arguments, daemon=True)
        self._process.start()
        for theirs in (asked, answers):
            theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def sample(self) -> int:
        """The id of the sample that it is loading, or was when it ended."""
        return int(self._at[0])

    @property
    def due(self) -> float:
        """When it will have been silent for its allowance, which begins once it runs: a busy machine starts it late."""
        began = self._at[1] / 1e9 or self.since + START_SECONDS
        return max(self.since, began) + self._allowance

    @property
    def answers(self) -> Connection:
        """What to wait at for the next answer."""
        return self._answers

    def ask(self, step: int) -> None:
        """Have it load `step` after those that it owes already."""
        assert len(self.owed) < NUM_SLOTS
        if not self.owed:
            self.since = time.monotonic()
        self.owed.append(step)
        with suppress(BrokenPipeError):  # it is dead, which will be noticed where the answer should come
            os.write(self._asks.fileno(), STEP.pack(step))

    def receive(self) -> tuple[LoadedArrays, float]:
        """Return the work of the step that it has owed longest, and the seconds it took.

        Waits until there is an answer, the process ends, or it takes too long. The arrays lie in shared memory: copy
        them before the next step is asked for.
        """
        try:
            well, size = HEAD.unpack(self._read(memoryview(bytearray(HEAD.size))))
            words = json.loads(bytes(self._read(memoryview(bytearray(size)))))
        except (EOFError, OSError):
            self._process.join(timeout=1.0)
            raise DeadWorkerError(_how(self._process.exitcode)) from None
        if not well:
            raise RaisedInWorkerError(words)
        arrays = self._slots[self._received % NUM_SLOTS].arrays(words["arrays"], words["slot_bytes"])
        self.owed.popleft()
        self._received, self.since = self._received + 1, time.monotonic()
        return _load_of(words, arrays), words["seconds"]

    def _read(self, into: memoryview) -> memoryview:
        """Fill `into` and return it. A process may stop in the middle of a word, so none is waited for without end."""
        filled = 0
        while filled < len(into):
            if not self._answers.poll(self._allowance):
                raise HungWorkerError(f"nothing came for {self._allowance:g} s")
            size = os.readv(self._answers.fileno(), [into[filled:]])
            if not size:
                raise EOFError
            filled += size
        return into

    def kill(self) -> None:
        """End the process now; it holds nothing that could be lost. Any thread may."""
        self._process.kill()
        self._process.join(timeout=1.0)

    def let_go(self) -> None:
        """Close the pipes and give the memory back. For the thread that asks and receives."""
        for each in (self._answers, self._asks, *self._slots):
            each.close()

    def _run(self, read: Read, asked: Connection, answers: Connection, inherited: Sequence["Worker"]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a stop is agreed between ranks, which need their data until then
        self._at[1] = time.monotonic_ns()
        gc.freeze()  # what was inherited is never looked at again, and stays shared with the rank
        slots, self._slots = self._slots, ()
        # A fork inherits the rank's ends of all pipes. It has to close them, or no worker would notice that the rank is
        # gone; and the slots of the others, or their memory would outlive them.
        for each in inherited:
            each.let_go()
        with suppress(BrokenPipeError):  # the rank is gone
            number = 0
            while word := os.read(asked.fileno(), STEP.size):
                if not self._answer(read, STEP.unpack(word)[0], slots[number % NUM_SLOTS], answers):
                    return
                number += 1

    def _answer(self, read: Read, step: int, slot: SharedSlot, answers: Connection) -> bool:
        """Load `step` into the slot, tell so, and return whether all went well."""
        try:
            began = time.perf_counter()
            load = read(step, lambda sample: self._at.__setitem__(0, sample))
            self._at[0] = NO_SAMPLE
            places = slot.fill(load.arrays)
            words = _words_of(load) | {"arrays": places, "slot_bytes": slot.num_bytes}
            words["seconds"] = time.perf_counter() - began
        except Exception:
            _say(answers, traceback.format_exc(), well=False)
            return False
        _say(answers, words, well=True)
        return True


def _words_of(load: LoadedArrays) -> dict[str, Any]:
    """Return all of a load but the arrays."""
    bad = [(each.sample, each.reason) for each in load.bad]
    return {"num_valid": load.num_valid, "cuts": dict(load.cuts), "facts": dict(load.facts), "bad": bad}


def _load_of(words: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> LoadedArrays:
    cuts = {name: tuple(cut) for name, cut in words["cuts"].items()}
    bad = tuple(BadSample(*each) for each in words["bad"])
    return LoadedArrays(arrays=arrays, num_valid=words["num_valid"], cuts=cuts, facts=words["facts"], bad=bad)


def _say(pipe: Connection, words: Any, *, well: bool) -> None:
    text = json.dumps(words, default=_plain).encode()
    left = memoryview(HEAD.pack(well, len(text)) + text)
    while left:
        left = left[os.write(pipe.fileno(), left) :]


def _plain(value: Any) -> Any:
    """Return a number of numpy's as one of Python's."""
    return value.item()


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
