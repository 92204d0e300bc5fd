"""Loaders that fail, hang or are killed, and bad samples: the fault is named, and no batch or process is left over."""

import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.loaders import ALONE, Crashing, Damaged, Hanging, Loader, Raising, Slow, like, small_shards, within
from trimaran.data import IGNORED, DataShare, LoaderFault, SampleReader, Sequences, TokenShards


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return small_shards(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture
def sequences(shards: TokenShards) -> Sequences:
    return Sequences(shards, 8, True, 0, 41)


def step_of_sample_five(sequences: Sequences) -> int:
    with Loader(sequences, seed=0, share=ALONE, steps=21) as loader:
        return next(batch.step for batch in loader if 5 in batch.sample_ids)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_while_loading_is_raised_with_its_step_and_samples(sequences: Sequences, workers: int) -> None:
    step = step_of_sample_five(sequences)
    loader = Loader(like(Raising, sequences), seed=0, share=ALONE, steps=21, workers=workers)
    with within(2), pytest.raises(LoaderFault, match="the disk is on fire") as fault:
        list(loader)
    assert fault.value.step == step
    assert fault.value.sample_ids == (5,)
    assert str(fault.value).endswith(f"at step {step + 1}, sample 5")
    assert fault.value.worker in ((0, 1) if workers else (None,))
    assert "in __getitem__" in str(fault.value.__cause__) or isinstance(fault.value.__cause__, RuntimeError)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_hung_loader_is_detected_and_named(sequences: Sequences, workers: int) -> None:
    step = step_of_sample_five(sequences)
    loader = Loader(like(Hanging, sequences), seed=0, share=ALONE, steps=21, workers=workers, timeout_seconds=0.3)
    with within(6), pytest.raises(LoaderFault, match=r"has hung: no data for 0.3 s") as fault:
        list(loader)
    assert fault.value.step == step
    assert fault.value.sample_ids == (5,)
    assert fault.value.worker in ((0, 1) if workers else (None,))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_worker_is_replaced_without_losing_batches(sequences: Sequences, number: int) -> None:
    with Loader(sequences, seed=0, share=ALONE, steps=30) as loader:
        expected = list(loader)
    found, pids = [], set()
    with Loader(like(Slow, sequences), seed=0, share=ALONE, steps=30, workers=2, timeout_seconds=0.5) as loader:
        for batch in loader:
            found.append(batch)
            if batch.step in (3, 13):
                (pid, *_) = [child.pid for child in multiprocessing.active_children() if child.pid not in pids]
                assert pid is not None
                pids.add(pid)
                os.kill(pid, number)
    assert [batch.step for batch in found] == list(range(30))
    assert [batch.sample_ids for batch in found] == [batch.sample_ids for batch in expected]
    assert all(
        torch.equal(ours.arrays["tokens"], theirs.arrays["tokens"])
        for ours, theirs in zip(found, expected, strict=True)
    )
    assert not multiprocessing.active_children()
    assert len(pids) == 2


def test_a_sample_that_kills_its_worker_is_named_after_the_restarts(sequences: Sequences) -> None:
    step = step_of_sample_five(sequences)
    loader = Loader(like(Crashing, sequences), seed=0, share=ALONE, steps=21, workers=2)
    with within(6), pytest.raises(LoaderFault, match=r"crashed \(killed by SIGSEGV\) at step") as fault:
        list(loader)
    assert (fault.value.step, fault.value.sample_ids) == (step, (5,))
    assert fault.value.worker in (0, 1)
    assert not multiprocessing.active_children()


def test_a_sample_that_fails_twice_is_loaded_at_the_third_attempt(sequences: Sequences) -> None:
    kind = type("FailsTwice", (Raising,), {"failures": [2]})
    with Loader(like(kind, sequences), seed=0, share=ALONE, steps=21) as loader:
        assert len(list(loader)) == 21


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tokens: tokens[:5], r"shape \(5,\) instead of \(8,\)"),
        (lambda tokens: np.where(tokens == tokens[0], 300, tokens), "token id 300 is not one of the model's 257"),
        (lambda tokens: tokens - 200, r"token id -\d+ is not one of the model's 257"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_with_invalid_tokens_is_named(
    sequences: Sequences, workers: int, damage: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    kind = type("DamagedHere", (Damaged,), {"damage": staticmethod(damage)})
    reader = SampleReader(vocabulary=257)
    loader = Loader(like(kind, sequences), seed=0, share=ALONE, steps=21, workers=workers, reader=reader)
    with pytest.raises(LoaderFault, match=message) as fault:
        list(loader)
    assert fault.value.sample_ids == (5,)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_quarantined_sample_keeps_its_row_without_targets(sequences: Sequences, workers: int) -> None:
    with Loader(sequences, seed=0, share=ALONE, steps=21) as loader:
        expected = list(loader)
    reader = SampleReader(vocabulary=257, quarantined=frozenset({5, 6}))
    with Loader(like(Raising, sequences), seed=0, share=ALONE, steps=21, workers=workers, reader=reader) as loader:
        for ours, theirs in zip(loader, expected, strict=True):
            assert ours.sample_ids == theirs.sample_ids
            rows = [each in (5, 6) for each in ours.sample_ids]
            assert loader.num_quarantined(ours.step) == sum(rows)
            for row, quarantined in enumerate(rows):
                if quarantined:
                    assert not ours.arrays["tokens"][0, row].any()
                    assert (ours.arrays["labels"][0, row] == IGNORED).all()
                else:
                    assert torch.equal(ours.arrays["tokens"][0, row], theirs.arrays["tokens"][0, row])
                    assert torch.equal(ours.arrays["labels"][0, row], theirs.arrays["labels"][0, row])
            assert ours.num_valid == int((ours.arrays["labels"] != IGNORED).sum())


def test_workers_ignore_the_signals_that_stop_a_trainer(sequences: Sequences) -> None:
    with Loader(like(Slow, sequences), seed=0, share=ALONE, steps=10, workers=2) as loader:
        next(loader)
        for child in multiprocessing.active_children():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGTERM)
            os.kill(child.pid, signal.SIGINT)
        assert len(list(loader)) == 9


def test_closing_is_fast_and_leaves_no_process(sequences: Sequences) -> None:
    for kind, workers in itertools.product((Sequences, Slow, Hanging), (0, 2)):
        with within(2), Loader(like(kind, sequences), seed=0, share=ALONE, steps=1000, workers=workers) as loader:
            next(loader)
        assert not multiprocessing.active_children()
        loader.close()
        with pytest.raises(ValueError, match="closed"):
            next(loader)


def test_replaced_processes_leave_no_shared_memory(sequences: Sequences) -> None:
    def slots() -> int:
        """Return how many loader memfds this process holds."""
        names = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return sum("memfd:trimaran-loader" in name for name in names)

    gc.collect()  # drop leftovers of other tests
    before = slots()
    with Loader(like(Slow, sequences), seed=0, share=ALONE, steps=30, workers=2) as loader:
        for batch in loader:
            if batch.step in (6, 12, 18):
                pid = multiprocessing.active_children()[0].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
        assert slots() - before <= 2 * 2 * 2  # two processes with two slots each, as a file descriptor and as a mapping
    assert slots() <= before


SCRIPT = """
import multiprocessing, sys
from pathlib import Path
from trimaran.data import Sequences, TokenShards
from trimaran.data.feed import DataShare
from trimaran.data.loader import Loader
from trimaran.data.text.token_feed import TokenFeed

sequences = Sequences(TokenShards.open(Path(sys.argv[1])), 8, True, 0, 41)
share = DataShare(rank=0, dp=1, micro_batch=64, grad_accum=4)
loader = Loader(TokenFeed(sequences, seed=0, share=share), steps=9999, workers=2)
next(loader)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
"""


def load_and_die(path: Path, pipe: int) -> None:
    """Take a batch, write the ids of the workers, and be killed."""
    sequences = Sequences(TokenShards.open(path), 8, True, 0, 41)
    share = DataShare(rank=0, dp=1, micro_batch=64, grad_accum=4)
    loader = Loader(sequences, seed=0, share=share, steps=9999, workers=2)
    next(loader)
    os.write(pipe, " ".join(str(child.pid) for child in multiprocessing.active_children()).encode())
    os.kill(os.getpid(), signal.SIGKILL)


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # an orphan may stay a zombie if no parent reaps it
    except psutil.NoSuchProcess:
        return True


def assert_both_end(pids: list[int]) -> None:
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while not all(ended(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_workers_end_with_a_rank_that_is_killed(shards: TokenShards) -> None:
    reading, writing = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=load_and_die, args=(shards.path, writing))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert_both_end([int(pid) for pid in os.read(reading, 1000).split()])
    os.close(reading)
    os.close(writing)


def test_workers_end_with_a_rank_that_returns_without_closing_the_loader(shards: TokenShards) -> None:
    """The end of a real interpreter: nothing hangs and no process is left."""
    command = [sys.executable, "-c", SCRIPT, str(shards.path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert_both_end([int(pid) for pid in answer.stdout.split()])
