"""Memory that is taken and pinned behind the first steps: what fails, what is given back, and how a process ends."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
from torch import Tensor

from trimaran.checkpoint.memory import Berth
from trimaran.checkpoint.pinned import Preparation

SLOT_BYTES = 1 << 20


@pytest.fixture
def berth() -> Iterator[Berth]:
    """Two slots whose memory nobody has taken yet."""
    fd = os.memfd_create("test")
    made = Berth(fd)
    made.lay_out(2, num_bytes=SLOT_BYTES, items_bytes=100, take=False)
    yield made
    os.close(fd)


class Pin:
    """Stands for pages that are pinned; a GPU is not needed to count them."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory


def test_memory_is_taken_and_every_slot_pinned(berth: Berth) -> None:
    assert berth.taken_bytes < SLOT_BYTES < berth.num_bytes
    pinned: list[int] = []
    preparation = Preparation(berth, lambda memory: pinned.append(memory.data_ptr()))
    assert preparation.wait()
    assert (preparation.is_over, preparation.is_pinned) == (True, True)
    assert pinned == [slot.memory.data_ptr() for slot in berth.slots]
    assert berth.taken_bytes >= berth.num_bytes


def test_a_start_that_was_killed_while_memory_was_taken_leaves_the_rest_to_the_next(berth: Berth) -> None:
    os.posix_fallocate(berth.fd, 0, SLOT_BYTES)
    again = Berth(berth.fd)
    assert again.lay_out(2, num_bytes=SLOT_BYTES, items_bytes=100, take=False), "it is cut as before"
    assert again.taken_bytes < again.num_bytes, "what is still to be taken is not counted as taken"
    assert Preparation(again, Pin).wait()
    assert again.taken_bytes >= again.num_bytes


def test_where_no_more_may_be_pinned_nothing_is_and_copies_go_on(
    berth: Berth, caplog: pytest.LogCaptureFixture
) -> None:
    held: list[weakref.ref[Pin]] = []

    def pin(memory: Tensor) -> Pin:
        if held:
            raise RuntimeError("no more of it")
        made = Pin(memory)
        held.append(weakref.ref(made))
        return made

    preparation = Preparation(berth, pin)
    assert preparation.wait()
    assert not preparation.is_pinned
    gc.collect()
    assert held[0]() is None, "the first slot is not pinned any more"
    assert "no more of it" in caplog.text


def test_a_lack_of_memory_is_told_and_a_mistake_is_raised_where_training_waits(berth: Berth) -> None:
    class Full(Berth):
        def take(self, goes_on: object = None) -> None:
            raise OSError(28, "No space left on device")

    def wrong(memory: Tensor) -> Pin:
        raise TypeError("a mistake of ours")

    assert not Preparation(Full(berth.fd), Pin).wait()
    with pytest.raises(TypeError, match="a mistake of ours"):
        Preparation(berth, wrong).wait()


def test_what_is_let_go_is_pinned_no_more_and_no_further(berth: Berth) -> None:
    began, goes_on = threading.Event(), threading.Event()
    held: list[weakref.ref[Pin]] = []

    def pin(memory: Tensor) -> Pin:
        began.set()
        goes_on.wait()
        made = Pin(memory)
        held.append(weakref.ref(made))
        return made

    preparation = Preparation(berth, pin)
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
from trimaran.checkpoint.memory import Berth
from trimaran.checkpoint.pinned import Preparation

berth = Berth(os.memfd_create("test"))
berth.lay_out(50, num_bytes=4096, items_bytes=100, take=False)

def pin(memory):
    os.write(1, b"pinning\\n")
    time.sleep(0.3)
    os.write(1, b"pinned\\n")

preparation = Preparation(berth, pin)
time.sleep(0.1)
sys.exit(75)
"""


def test_a_process_that_ends_meanwhile_waits_for_one_slot_and_ends_as_it_wanted() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (75, "")
    assert done.stdout.splitlines() == ["pinning", "pinned"], "of 50 slots"
