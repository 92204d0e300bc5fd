"""Memory that is allocated and pinned during the first steps: failures, release, and the end of the process."""

import gc
import math
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from trimaran.checkpoint import BackgroundPinning, RankMemory, split_at_pin_chunks

SLOT_BYTES = 1 << 20


@pytest.fixture
def rank_memory() -> Iterator[RankMemory]:
    """Two slots whose memory is not allocated yet."""
    fd = os.memfd_create("test")
    memory = RankMemory(fd)
    memory.create_slots(2, num_bytes=SLOT_BYTES, items_bytes=100, allocate=False)
    yield memory
    os.close(fd)


class Pin:
    """Replaces pinning with a record of pinned pages, so that no GPU is needed."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory


def test_memory_is_allocated_and_every_slot_is_pinned(rank_memory: RankMemory) -> None:
    assert rank_memory.allocated_bytes < SLOT_BYTES < rank_memory.num_bytes
    pinned: list[int] = []
    pinning = BackgroundPinning(rank_memory, lambda memory: pinned.append(memory.data_ptr()))
    assert pinning.wait()
    assert (pinning.is_done, pinning.is_pinned) == (True, True)
    assert pinned == [slot.memory.data_ptr() for slot in rank_memory.slots]
    assert rank_memory.allocated_bytes >= rank_memory.num_bytes


def test_a_slot_is_pinned_in_chunks_with_pauses_for_training(rank_memory: RankMemory) -> None:
    spans: list[tuple[float, float, int]] = []

    def pin(memory: Tensor) -> Pin:
        began = time.monotonic()
        time.sleep(0.01)
        spans.append((began, time.monotonic(), memory.nbytes))
        return Pin(memory)

    assert BackgroundPinning(rank_memory, pin, chunk_bytes=SLOT_BYTES // 4).wait()
    assert sum(size for _, _, size in spans) == sum(slot.memory.nbytes for slot in rank_memory.slots)
    assert max(size for _, _, size in spans) == SLOT_BYTES // 4
    assert all(after - end >= 0.01 for (_, end, _), (after, _, _) in pairwise(spans))


@pytest.mark.parametrize("shape", [(7,), (1000,), (31, 33), (5, 7, 11), (1, 1000), (3, 1, 400)])
def test_a_copy_is_split_at_chunk_ends_and_is_complete(shape: tuple[int, ...]) -> None:
    slot = torch.zeros(8192, dtype=torch.uint8)
    values = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    target = slot[192 : 192 + values.nbytes].view(torch.float32).view(shape)
    for into, part in split_at_pin_chunks(slot, target, values, chunk_bytes=256):
        first = into.data_ptr() - slot.data_ptr()
        assert into.is_contiguous()
        assert first // 256 == (first + into.nbytes - 1) // 256
        assert isinstance(part, torch.Tensor)
        into += part  # adding shows what is copied twice
    assert torch.equal(target, values)


def test_an_allocation_that_was_killed_is_completed_by_the_next_start(rank_memory: RankMemory) -> None:
    os.posix_fallocate(rank_memory.fd, 0, SLOT_BYTES)
    again = RankMemory(rank_memory.fd)
    assert again.create_slots(2, num_bytes=SLOT_BYTES, items_bytes=100, allocate=False), (
        "the layout is the same as before"
    )
    assert again.allocated_bytes < again.num_bytes, "memory that is not allocated yet is not counted"
    assert BackgroundPinning(again, Pin).wait()
    assert again.allocated_bytes >= again.num_bytes


def test_nothing_stays_pinned_if_the_system_limits_pinning(
    rank_memory: RankMemory, caplog: pytest.LogCaptureFixture
) -> None:
    held: list[weakref.ref[Pin]] = []

    def pin(memory: Tensor) -> Pin:
        if held:
            raise RuntimeError("pinning is limited")
        pin = Pin(memory)
        held.append(weakref.ref(pin))
        return pin

    pinning = BackgroundPinning(rank_memory, pin)
    assert pinning.wait()
    assert not pinning.is_pinned
    gc.collect()
    assert held[0]() is None, "the first slot is no longer pinned"
    assert "pinning is limited" in caplog.text


def test_wait_reports_a_lack_of_memory_and_raises_other_errors(rank_memory: RankMemory) -> None:
    class Full(RankMemory):
        def allocate(self, should_continue: object = None) -> None:
            raise OSError(28, "No space left on device")

    def fail(memory: Tensor) -> Pin:
        raise TypeError("a bug")

    assert not BackgroundPinning(Full(rank_memory.fd), Pin).wait()
    with pytest.raises(TypeError, match="a bug"):
        BackgroundPinning(rank_memory, fail).wait()


def test_release_unpins_and_stops_pinning(rank_memory: RankMemory) -> None:
    began, may_continue = threading.Event(), threading.Event()
    held: list[weakref.ref[Pin]] = []

    def pin(memory: Tensor) -> Pin:
        began.set()
        may_continue.wait()
        pin = Pin(memory)
        held.append(weakref.ref(pin))
        return pin

    pinning = BackgroundPinning(rank_memory, pin)
    began.wait()
    releasing = threading.Thread(target=pinning.release)
    releasing.start()
    while not pinning.is_cancelled:
        pass
    may_continue.set()
    releasing.join()
    gc.collect()
    assert [each() for each in held] == [None], "the first slot is unpinned, the second was never pinned"


def end_while_pinning(pipe: int) -> None:
    """Exit while the first of 50 slots is being pinned."""
    rank_memory = RankMemory(os.memfd_create("test"))
    rank_memory.create_slots(50, num_bytes=4096, items_bytes=100, allocate=False)
    began = threading.Event()

    def pin(memory: Tensor) -> None:
        os.write(pipe, b"pinning\n")
        began.set()
        time.sleep(0.3)
        os.write(pipe, b"pinned\n")

    BackgroundPinning(rank_memory, pin)
    began.wait()
    sys.exit(75)


def test_a_process_that_ends_meanwhile_waits_for_one_slot_and_keeps_its_exit_code() -> None:
    reading, writing = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=end_while_pinning, args=(writing,))
    process.start()
    os.close(writing)
    process.join(timeout=60)
    assert process.exitcode == 75
    with open(reading) as lines:
        assert lines.read().split() == ["pinning", "pinned"], "of 50 slots"
