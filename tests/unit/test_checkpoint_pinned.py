"""Memory that is taken and pinned behind the first steps: what fails, what is given back, and how a process ends."""

import gc
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from trimaran.checkpoint import pinned_memory
from trimaran.checkpoint.memory_copies import RankMemory
from trimaran.checkpoint.pinned_memory import Preparation, within_stretches

SLOT_BYTES = 1 << 20


@pytest.fixture
def rank_memory() -> Iterator[RankMemory]:
    """Two slots whose memory nobody has taken yet."""
    fd = os.memfd_create("test")
    made = RankMemory(fd)
    made.lay_out(2, num_bytes=SLOT_BYTES, items_bytes=100, take=False)
    yield made
    os.close(fd)


class Pin:
    """Stands for pages that are pinned; a GPU is not needed to count them."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory


def test_memory_is_taken_and_every_slot_pinned(rank_memory: RankMemory) -> None:
    assert rank_memory.taken_bytes < SLOT_BYTES < rank_memory.num_bytes
    places: list[int] = []
    preparation = Preparation(rank_memory, lambda memory: places.append(memory.data_ptr()))
    assert preparation.wait()
    assert (preparation.is_over, preparation.is_pinned) == (True, True)
    assert places == [slot.memory.data_ptr() for slot in rank_memory.slots]
    assert rank_memory.taken_bytes >= rank_memory.num_bytes


def test_a_slot_is_pinned_a_stretch_at_a_time_with_a_turn_for_training_between(
    rank_memory: RankMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_memory, "STRETCH", SLOT_BYTES // 4)
    spans: list[tuple[float, float, int]] = []

    def pin(memory: Tensor) -> Pin:
        began = time.monotonic()
        time.sleep(0.01)
        spans.append((began, time.monotonic(), memory.nbytes))
        return Pin(memory)

    assert Preparation(rank_memory, pin).wait()
    assert sum(size for _, _, size in spans) == sum(slot.memory.nbytes for slot in rank_memory.slots)
    assert max(size for _, _, size in spans) == SLOT_BYTES // 4
    assert all(after - end >= 0.01 for (_, end, _), (after, _, _) in pairwise(spans))


@pytest.mark.parametrize("shape", [(7,), (1000,), (31, 33), (5, 7, 11), (1, 1000), (3, 1, 400)])
def test_no_piece_of_a_copy_spans_two_stretches_and_none_is_left_out(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_memory, "STRETCH", 256)
    slot = torch.zeros(8192, dtype=torch.uint8)
    values = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    target = slot[192 : 192 + values.nbytes].view(torch.float32).view(shape)
    for into, part in within_stretches(slot, target, values):
        first = into.data_ptr() - slot.data_ptr()
        assert into.is_contiguous()
        assert first // 256 == (first + into.nbytes - 1) // 256
        into += part  # what came twice would be there twice
    assert torch.equal(target, values)


def test_a_start_that_was_killed_while_memory_was_taken_leaves_the_rest_to_the_next(rank_memory: RankMemory) -> None:
    os.posix_fallocate(rank_memory.fd, 0, SLOT_BYTES)
    again = RankMemory(rank_memory.fd)
    assert again.lay_out(2, num_bytes=SLOT_BYTES, items_bytes=100, take=False), "it is cut as before"
    assert again.taken_bytes < again.num_bytes, "what is still to be taken is not counted as taken"
    assert Preparation(again, Pin).wait()
    assert again.taken_bytes >= again.num_bytes


def test_where_no_more_may_be_pinned_nothing_is_and_copies_go_on(
    rank_memory: RankMemory, caplog: pytest.LogCaptureFixture
) -> None:
    held: list[weakref.ref[Pin]] = []

    def pin(memory: Tensor) -> Pin:
        if held:
            raise RuntimeError("no more of it")
        made = Pin(memory)
        held.append(weakref.ref(made))
        return made

    preparation = Preparation(rank_memory, pin)
    assert preparation.wait()
    assert not preparation.is_pinned
    gc.collect()
    assert held[0]() is None, "the first slot is not pinned any more"
    assert "no more of it" in caplog.text


def test_a_lack_of_memory_is_told_and_a_mistake_is_raised_where_training_waits(rank_memory: RankMemory) -> None:
    class Full(RankMemory):
        def take(self, goes_on: object = None) -> None:
            raise OSError(28, "No space left on device")

    def wrong(memory: Tensor) -> Pin:
        raise TypeError("a mistake of ours")

    assert not Preparation(Full(rank_memory.fd), Pin).wait()
    with pytest.raises(TypeError, match="a mistake of ours"):
        Preparation(rank_memory, wrong).wait()


def test_what_is_let_go_is_pinned_no_more_and_no_further(rank_memory: RankMemory) -> None:
    began, goes_on = threading.Event(), threading.Event()
    held: list[weakref.ref[Pin]] = []

    def pin(memory: Tensor) -> Pin:
        began.set()
        goes_on.wait()
        made = Pin(memory)
        held.append(weakref.ref(made))
        return made

    preparation = Preparation(rank_memory, pin)
    began.wait()
    letting = threading.Thread(target=preparation.let_go)
    letting.start()
    while not preparation._is_off:
        pass
    goes_on.set()
    letting.join()
    gc.collect()
    assert [each() for each in held] == [None], "the first slot is free again, the second was never pinned"


ENDING = """
import os, sys, time
from trimaran.checkpoint.memory_copies import RankMemory
from trimaran.checkpoint.pinned_memory import Preparation

rank memory = RankMemory(os.memfd_create("test"))
rank memory.lay_out(50, num_bytes=4096, items_bytes=100, take=False)

def pin(memory):
    os.write(1, b"pinning\\n")
    time.sleep(0.3)
    os.write(1, b"pinned\\n")

preparation = Preparation(rank memory, pin)
time.sleep(0.1)
sys.exit(75)
"""


def test_a_process_that_ends_meanwhile_waits_for_one_slot_and_ends_as_it_wanted() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (75, "")
    assert done.stdout.splitlines() == ["pinning", "pinned"], "of 50 slots"
