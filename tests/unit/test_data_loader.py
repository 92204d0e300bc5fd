"""Batches of one rank, loaded while it computes."""

import gc
import itertools
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from trimaran.core import UserError
from trimaran.data import IGNORED, ByteTokenizer, Sample, Sequences, ShardWriter, TokenShards
from trimaran.data.feed import BadSample, Load, Share
from trimaran.data.loader import Loader as AnyLoader
from trimaran.data.loader import LoaderFault
from trimaran.data.quarantine import Screen
from trimaran.data.token_feed import TokenFeed
from trimaran.data.tuner import Room

ROOMY = Room(cores=4, free_bytes=1 << 30)
ALONE = Share(rank=0, dp=1, micro_batch=2, grad_accum=1)


def Loader(  # noqa: N802 - a loader of sequences
    sequences: Sequences, *, seed: int, share: Share, screen: Screen | None = None, **options: Any
) -> AnyLoader:
    return AnyLoader(TokenFeed(sequences, seed=seed, share=share, screen=screen), **options)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    """41 sequences of 8 tokens in documents of 3 to 12 bytes."""
    path = tmp_path_factory.mktemp("data") / "shards"
    with ShardWriter(path, ByteTokenizer(), shard_tokens=50) as writer:
        for number in range(41):
            writer.append(np.full(3 + number % 10, number))
            writer.end_document()
    return TokenShards.open(path)


@pytest.fixture
def sequences(shards: TokenShards) -> Sequences:
    return Sequences(shards, 8, True, 0, 41)


class Slow(Sequences):
    """Takes 20 ms a sample."""

    def __getitem__(self, index: int) -> Sample:
        time.sleep(0.02)
        return super().__getitem__(index)


class Broken(Sequences):
    """Raises at sample 5: always, or as many times as `failures` says."""

    failures = (math.inf,)

    def __getitem__(self, index: int) -> Sample:
        if index == 5 and self.failures[0] > 0:
            if isinstance(self.failures, list):
                self.failures[0] -= 1
            raise RuntimeError("the disk is on fire")
        return super().__getitem__(index)


class Deadly(Sequences):
    """Kills the process that loads sample 5."""

    def __getitem__(self, index: int) -> Sample:
        if index == 5:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__getitem__(index)


class Poisoned(Sequences):
    """Has other tokens in sample 5 than it should."""

    damage: Callable[[np.ndarray], np.ndarray]

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        return replace(sample, tokens=self.damage(sample.tokens)) if index == 5 else sample


class Stuck(Sequences):
    """Never comes back from sample 5."""

    def __getitem__(self, index: int) -> Sample:
        if index == 5:
            time.sleep(1000)
        return super().__getitem__(index)


def like(kind: type[Sequences], sequences: Sequences) -> Sequences:
    return kind(sequences.shards, sequences.seq_len, sequences.isolate, sequences.first, sequences.last)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def test_one_epoch_meets_each_sample_once(sequences: Sequences) -> None:
    share = Share(rank=0, dp=1, micro_batch=1, grad_accum=1)
    with Loader(sequences, seed=3, share=share, steps=82) as loader:
        seen = [batch.sample_ids[0] for batch in loader]
    assert sorted(seen[:41]) == sorted(seen[41:]) == list(range(41))
    assert seen[:41] != seen[41:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("dp", "micro_batch", "grad_accum"), [(1, 12, 1), (1, 2, 6), (2, 3, 2), (4, 1, 3), (12, 1, 1)])
def test_samples_and_their_order_do_not_depend_on_the_plan(
    sequences: Sequences, dp: int, micro_batch: int, grad_accum: int, workers: int
) -> None:
    steps, start = 3, 2
    one = Share(rank=0, dp=1, micro_batch=12, grad_accum=1)
    with Loader(sequences, seed=1, share=one, steps=steps + start) as loader:
        expected = list(loader)[start:]
    parts = []
    for rank in range(dp):
        share = Share(rank=rank, dp=dp, micro_batch=micro_batch, grad_accum=grad_accum)
        with Loader(sequences, seed=1, share=share, start_step=start, steps=steps + start, workers=workers) as loader:
            parts.append(list(loader))
    for step, whole in enumerate(expected):
        batches = [part[step] for part in parts]
        assert {batch.step for batch in batches} == {whole.step}
        ids = [np.reshape(batch.sample_ids, (grad_accum, 1, micro_batch)) for batch in batches]
        assert np.concatenate(ids, axis=1).ravel().tolist() == list(whole.sample_ids)
        for name in ("tokens", "labels", "documents"):
            together = torch.stack([batch.arrays[name] for batch in batches], dim=1)
            assert torch.equal(together.reshape(1, 12, 8), whole.arrays[name])
        assert sum(batch.num_valid for batch in batches) == whole.num_valid


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_holds_what_its_samples_hold(sequences: Sequences, workers: int) -> None:
    share = Share(rank=1, dp=2, micro_batch=2, grad_accum=3)
    with Loader(sequences, seed=0, share=share, steps=4, workers=workers) as loader:
        for batch in loader:
            samples = [sequences[index] for index in batch.sample_ids]
            assert batch.arrays["tokens"].shape == batch.arrays["labels"].shape == (3, 2, 8)
            assert batch.arrays["tokens"].dtype == batch.arrays["labels"].dtype == torch.int64
            assert "documents" in batch.arrays
            assert batch.arrays["documents"].dtype == torch.int32
            assert np.array_equal(batch.arrays["tokens"].reshape(6, 8), [sample.tokens for sample in samples])
            assert np.array_equal(batch.arrays["labels"].reshape(6, 8), [sample.labels for sample in samples])
            assert np.array_equal(batch.arrays["documents"].reshape(6, 8), [sample.documents for sample in samples])
            assert batch.num_valid == int((batch.arrays["labels"] >= 0).sum()) < 6 * 8


def test_without_isolation_every_label_counts_and_there_are_no_documents(shards: TokenShards) -> None:
    with Loader(Sequences(shards, 8, False, 0, 41), seed=0, share=ALONE, steps=1) as loader:
        batch = next(loader).to(torch.device("cpu"))
    assert "documents" not in batch.arrays
    assert batch.num_valid == 16


def step_of_sample_five(sequences: Sequences) -> int:
    with Loader(sequences, seed=0, share=ALONE, steps=21) as loader:
        return next(batch.step for batch in loader if 5 in batch.sample_ids)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_while_loading_is_raised_with_its_step_and_samples(sequences: Sequences, workers: int) -> None:
    step = step_of_sample_five(sequences)
    loader = Loader(like(Broken, sequences), seed=0, share=ALONE, steps=21, workers=workers)
    with within(2), pytest.raises(LoaderFault, match="the disk is on fire") as fault:
        list(loader)
    assert fault.value.step == step
    assert fault.value.sample_ids == (5,)
    assert str(fault.value).endswith(f"at step {step + 1}, sample 5")
    assert fault.value.worker in ((0, 1) if workers else (None,))
    assert "in __getitem__" in str(fault.value.__cause__) or isinstance(fault.value.__cause__, RuntimeError)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_hangs_is_noticed_and_named(sequences: Sequences, workers: int) -> None:
    step = step_of_sample_five(sequences)
    loader = Loader(like(Stuck, sequences), seed=0, share=ALONE, steps=21, workers=workers, timeout_seconds=0.3)
    with within(6), pytest.raises(LoaderFault, match=r"has hung: nothing came for 0.3 s") as fault:
        list(loader)
    assert fault.value.step == step
    assert fault.value.sample_ids == (5,)
    assert fault.value.worker in ((0, 1) if workers else (None,))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_stands_still_is_replaced_and_nothing_is_lost(sequences: Sequences, number: int) -> None:
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


def test_a_sample_that_kills_its_worker_is_named_after_a_few_tries(sequences: Sequences) -> None:
    step = step_of_sample_five(sequences)
    loader = Loader(like(Deadly, sequences), seed=0, share=ALONE, steps=21, workers=2)
    with within(6), pytest.raises(LoaderFault, match=r"crashed \(killed by SIGSEGV\) at step") as fault:
        list(loader)
    assert (fault.value.step, fault.value.sample_ids) == (step, (5,))
    assert fault.value.worker in (0, 1)
    assert not multiprocessing.active_children()


def test_a_sample_that_fails_now_and_then_is_loaded_in_the_end(sequences: Sequences) -> None:
    kind = type("Moody", (Broken,), {"failures": [2]})
    with Loader(like(kind, sequences), seed=0, share=ALONE, steps=21) as loader:
        assert len(list(loader)) == 21


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda tokens: tokens[:5], r"shape \(5,\) instead of \(8,\)"),
        (lambda tokens: np.where(tokens == tokens[0], 300, tokens), "token id 300 is not one of the model's 257"),
        (lambda tokens: tokens - 200, r"token id -\d+ is not one of the model's 257"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_the_model_cannot_take_is_named(
    sequences: Sequences, workers: int, damage: Callable[[np.ndarray], np.ndarray], what: str
) -> None:
    kind = type("Damaged", (Poisoned,), {"damage": staticmethod(damage)})
    screen = Screen(vocabulary=257)
    loader = Loader(like(kind, sequences), seed=0, share=ALONE, steps=21, workers=workers, screen=screen)
    with pytest.raises(LoaderFault, match=what) as fault:
        list(loader)
    assert fault.value.sample_ids == (5,)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_in_quarantine_keeps_its_row_and_has_no_target(sequences: Sequences, workers: int) -> None:
    with Loader(sequences, seed=0, share=ALONE, steps=21) as loader:
        expected = list(loader)
    screen = Screen(vocabulary=257, quarantined=frozenset({5, 6}))
    with Loader(like(Broken, sequences), seed=0, share=ALONE, steps=21, workers=workers, screen=screen) as loader:
        for ours, theirs in zip(loader, expected, strict=True):
            assert ours.sample_ids == theirs.sample_ids
            rows = [each in (5, 6) for each in ours.sample_ids]
            assert loader.num_quarantined(ours.step) == sum(rows)
            for row, left_out in enumerate(rows):
                if left_out:
                    assert not ours.arrays["tokens"][0, row].any()
                    assert (ours.arrays["labels"][0, row] == IGNORED).all()
                else:
                    assert torch.equal(ours.arrays["tokens"][0, row], theirs.arrays["tokens"][0, row])
                    assert torch.equal(ours.arrays["labels"][0, row], theirs.arrays["labels"][0, row])
            assert ours.num_valid == int((ours.arrays["labels"] != IGNORED).sum())


def test_the_samples_of_other_ranks_are_known_too(sequences: Sequences) -> None:
    shares = [Share(rank=rank, dp=3, micro_batch=2, grad_accum=2) for rank in range(3)]
    loaders = [Loader(sequences, seed=0, share=share, steps=5) for share in shares]
    assert loaders[0].samples(4, [1]) == loaders[1].sample_ids(4)
    assert loaders[0].samples(4, [0, 2]) == loaders[0].sample_ids(4) + loaders[2].sample_ids(4)
    for loader in loaders:
        loader.close()


def test_workers_outlive_the_signals_that_stop_a_trainer(sequences: Sequences) -> None:
    with Loader(like(Slow, sequences), seed=0, share=ALONE, steps=10, workers=2) as loader:
        next(loader)
        for child in multiprocessing.active_children():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGTERM)
            os.kill(child.pid, signal.SIGINT)
        assert len(list(loader)) == 9


def test_closing_is_prompt_and_leaves_no_process(sequences: Sequences) -> None:
    for kind, workers in itertools.product((Sequences, Slow, Stuck), (0, 2)):
        with within(2), Loader(like(kind, sequences), seed=0, share=ALONE, steps=1000, workers=workers) as loader:
            next(loader)
        assert not multiprocessing.active_children()
        loader.close()
        with pytest.raises(ValueError, match="closed"):
            next(loader)


def test_auto_adds_processes_when_the_trainer_waits_and_changes_no_batch(
    sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimaran.data.waits.WINDOW_SECONDS", 0.1)
    room = Room(cores=3, free_bytes=1 << 30)
    with Loader(sequences, seed=0, share=ALONE, steps=60) as loader:
        expected = [(batch.step, batch.sample_ids, batch.arrays["tokens"].tolist()) for batch in loader]
        assert loader.facts()["workers"] == 0
        assert not loader.changes
    found = []
    with Loader(like(Slow, sequences), seed=0, share=ALONE, steps=60, workers="auto", room=room) as loader:
        for batch in loader:
            found.append((batch.step, batch.sample_ids, batch.arrays["tokens"].tolist()))
            time.sleep(0.015)
        assert found == expected
        assert loader.facts()["waited_seconds"] > 0.2
    first = loader.changes[0]
    assert first.setting.workers == 3
    assert "spent waiting for batches" in first.reason
    assert len(loader.changes) <= 3


def test_a_fixed_number_of_processes_stays(sequences: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimaran.data.waits.WINDOW_SECONDS", 0.05)
    with Loader(like(Slow, sequences), seed=0, share=ALONE, steps=20, workers=1, room=ROOMY) as loader:
        assert len(list(loader)) == 20
        assert not loader.changes
        assert loader.facts()["workers"] == 1


class Wide:
    """A feed with arrays of many shapes and kinds, some ragged, some empty, the largest much larger than the first."""

    share = ALONE

    def load(self, step: int, at: Callable[[int], None]) -> Load:
        at(step)
        draw = np.random.default_rng(step)
        arrays = {
            "tokens": draw.integers(0, 9, (1, 2, 8)),
            "patches": draw.integers(0, 255, (step**3 % 1000, 48), dtype=np.uint8),
            "grids": np.zeros((0, 2), dtype=np.int32),
            "flags": draw.random((1, 2)) > 0.5,
            "turned": draw.random((5, 3), dtype=np.float32).T,
        }
        cuts = {"patches": (0, step**3 % 1000), "grids": (0, 0)}
        bad = (BadSample(step, "torn"),) if step % 2 else ()
        return Load(arrays=arrays, num_valid=step, cuts=cuts, facts={"waste": np.float64(step / 3)}, bad=bad)

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        return (step,)

    def num_quarantined(self, step: int) -> int:
        return 0


@pytest.mark.parametrize("workers", [0, 2])
def test_whatever_a_feed_loads_arrives_as_it_was(workers: int) -> None:
    with AnyLoader(Wide(), steps=30, workers=workers, room=ROOMY) as loader:
        batches = list(loader)
    for step, batch in enumerate(batches):
        load = Wide().load(step, lambda _: None)
        assert (batch.step, batch.num_valid, batch.cuts, batch.bad) == (step, step, load.cuts, load.bad)
        assert batch.facts == load.facts
        assert batch.arrays.keys() == load.arrays.keys()
        for name, array in load.arrays.items():
            assert batch.arrays[name].numpy().dtype == array.dtype
            assert np.array_equal(batch.arrays[name].numpy(), array)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_loaded_while_the_trainer_computes(workers: int) -> None:
    third = multiprocessing.get_context("fork").Event()

    class Telling(Wide):
        def load(self, step: int, at: Callable[[int], None]) -> Load:
            if step == 2:
                third.set()
            return super().load(step, at)

    with AnyLoader(Telling(), steps=10, workers=workers, room=ROOMY) as loader:
        next(loader)
        assert third.wait(timeout=10)  # nobody asks for it


def test_two_processes_load_at_the_same_time() -> None:
    meeting = multiprocessing.get_context("fork").Barrier(2, timeout=10)

    class Meeting(Wide):
        def load(self, step: int, at: Callable[[int], None]) -> Load:
            if step < 2:
                meeting.wait()  # breaks when nobody else comes
            return super().load(step, at)

    with AnyLoader(Meeting(), steps=9, workers=2, room=ROOMY) as loader:
        assert [batch.step for batch in loader] == list(range(9))


def test_a_step_that_is_slow_holds_up_no_other_process() -> None:
    """Step 2 is not done before step 10, which would be its own process's if they took turns."""
    reached = multiprocessing.get_context("fork").Event()

    class Uneven(Wide):
        def load(self, step: int, at: Callable[[int], None]) -> Load:
            if step == 10:
                reached.set()
            assert step != 2 or reached.wait(timeout=5)
            return super().load(step, at)

    with AnyLoader(Uneven(), steps=13, workers=2, room=ROOMY) as loader:
        loader._tuner.setting = replace(loader._tuner.setting, depth=13)
        assert [batch.step for batch in loader] == list(range(13))


class Heavy(Wide):
    """A megabyte a step; tells the furthest step that was begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def load(self, step: int, at: Callable[[int], None]) -> Load:
        self.begun.append(step)
        return Load(arrays={"tokens": np.zeros((1, 2, 1 << 16))}, num_valid=1)


def test_no_more_is_loaded_ahead_than_memory_has_room_for() -> None:
    feed = Heavy()
    room = Room(cores=1, free_bytes=4 << 20)  # a quarter of it: one batch
    with AnyLoader(feed, steps=9, room=room) as loader:
        next(loader)
        time.sleep(0.1)
        assert max(feed.begun) <= 1
        assert [batch.step for batch in loader] == list(range(1, 9))


def test_batches_that_memory_has_no_room_for_are_refused_before_the_first_step() -> None:
    with pytest.raises(UserError, match="T060: 4 loader processes and 6 batches ahead") as refusal:
        next(AnyLoader(Heavy(), steps=9, workers=4, room=Room(cores=4, free_bytes=16 << 20)))
    assert "set data.workers to auto" in refusal.value.fix
    with pytest.raises(UserError, match="T060: the loader and 2 batches"):
        next(AnyLoader(Heavy(), steps=9, workers="auto", room=Room(cores=4, free_bytes=1 << 20)))
    assert not multiprocessing.active_children()


def test_no_memory_is_left_behind_by_processes_that_were_replaced(sequences: Sequences) -> None:
    def slots() -> int:
        """How often this process holds memory that it shares with loaders."""
        names = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return sum("memfd:trimaran-loader" in name for name in names)

    gc.collect()  # what other tests have left
    before = slots()
    with Loader(like(Slow, sequences), seed=0, share=ALONE, steps=30, workers=2) as loader:
        for batch in loader:
            if batch.step in (6, 12, 18):
                pid = multiprocessing.active_children()[0].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
        assert slots() - before <= 2 * 2 * 2  # of two processes two slots each, as a file and as memory
    assert slots() <= before


@pytest.mark.parametrize("dp", [1, 2, 5])
def test_an_epoch_ends_at_the_same_step_on_all_ranks_and_its_last_batch_is_filled_up(
    sequences: Sequences, dp: int
) -> None:
    """41 sequences, twice and a half: 102 rows in batches of 10."""
    seen: Counter[int] = Counter()
    valid = 0
    for rank in range(dp):
        share = Share(rank=rank, dp=dp, micro_batch=1, grad_accum=10 // dp)
        feed = TokenFeed(sequences, seed=0, share=share, epochs=2.5)
        assert feed.steps_in(2.5) == 11
        with AnyLoader(feed, steps=feed.steps_in(2.5)) as loader:
            batches = list(loader)
        assert len(batches) == 11
        assert {batch.arrays["tokens"].shape for batch in batches} == {(10 // dp, 1, 8)}
        seen.update(itertools.chain.from_iterable(batch.sample_ids for batch in batches))
        valid += batches[-1].num_valid
        empty = batches[-1].arrays["labels"][len(batches[-1].sample_ids) :]
        assert (empty == IGNORED).all()
    assert set(seen) == set(range(41))
    assert seen.total() == 102
    assert set(seen.values()) == {2, 3}
    assert 0 < valid < 2 * 8 + 1


SCRIPT = """
import multiprocessing, os, signal, sys
from pathlib import Path
from trimaran.data import Sequences, TokenShards
from trimaran.data.feed import Share
from trimaran.data.loader import Loader
from trimaran.data.token_feed import TokenFeed

sequences = Sequences(TokenShards.open(Path(sys.argv[1])), 8, True, 0, 41)
share = Share(rank=0, dp=1, micro_batch=64, grad_accum=4)
loader = Loader(TokenFeed(sequences, seed=0, share=share), steps=9999, workers=2)
next(loader)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # nobody may be there to reap an orphan
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("how", ["die", "return"])
def test_workers_end_with_their_rank(shards: TokenShards, how: str) -> None:
    """Killed, or at its end without a close: nothing waits for ever and nothing is left."""
    command = [sys.executable, "-c", SCRIPT, str(shards.path), how]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert answer.returncode == (-signal.SIGKILL if how == "die" else 0), answer.stderr
    pids = [int(pid) for pid in answer.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 3
    while not all(ended(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
