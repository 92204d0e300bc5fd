"""Heartbeats in shared memory, read while their rank writes them."""

import itertools
import mmap
import os
import signal
import time

from trimaran.runs import HEADER_WORDS, STEP, VERSION, HeartbeatBoard

NUM_READS = 20_000


def test_a_reader_never_sees_half_of_a_write() -> None:
    board = HeartbeatBoard.make(2)
    board.clear()
    began = time.monotonic()
    if (writer := os.fork()) == 0:
        mine, number = HeartbeatBoard(board.fd), 0
        while True:
            number += 1
            mine.enter(1, "sampling" if number % 2 else "step", 1001 if number % 2 else 1000)
    try:
        found = set()
        for number in itertools.count():
            if number >= NUM_READS and len(found) == 3:
                break
            heartbeat = board.read(1)
            assert heartbeat.entered >= began - 1
            found.add((heartbeat.section, heartbeat.step))
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert found == {("start", 0), ("step", 1000), ("sampling", 1001)}


def test_a_rank_that_is_interrupted_while_it_writes_is_seen_as_before() -> None:
    board = HeartbeatBoard.make(1)
    board.clear()
    board.enter(0, "step", 7)
    before = board.read(0)
    words = memoryview(mmap.mmap(board.fd, 0)).cast("Q")
    row = words[HEADER_WORDS:]
    row[VERSION] += 1  # it is odd from the first to the last word of a write
    row[STEP] = 8
    assert board.read(0) == before
    row[VERSION] += 1
    assert board.read(0).step == 8
