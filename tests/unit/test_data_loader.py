"""Background loading of the batches of one rank."""

import itertools
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.loaders import ALONE, LARGE_LIMITS, Loader, Slow, like, small_shards
from trimaran.core import UserError
from trimaran.data import (
    IGNORED,
    BadSample,
    DataShare,
    LoadedArrays,
    LoaderLimits,
    Sequences,
    TokenFeed,
    TokenShards,
    positions,
)
from trimaran.data import Loader as AnyLoader


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return small_shards(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture
def sequences(shards: TokenShards) -> Sequences:
    return Sequences(shards, 8, True, 0, 41)


def test_one_epoch_has_each_sample_once(sequences: Sequences) -> None:
    share = DataShare(rank=0, dp=1, micro_batch=1, grad_accum=1)
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
    one = DataShare(rank=0, dp=1, micro_batch=12, grad_accum=1)
    with Loader(sequences, seed=1, share=one, steps=steps + start) as loader:
        expected = list(loader)[start:]
    parts = []
    for rank in range(dp):
        share = DataShare(rank=rank, dp=dp, micro_batch=micro_batch, grad_accum=grad_accum)
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
def test_a_batch_equals_its_samples(sequences: Sequences, workers: int) -> None:
    share = DataShare(rank=1, dp=2, micro_batch=2, grad_accum=3)
    with Loader(sequences, seed=0, share=share, steps=4, workers=workers) as loader:
        for batch in loader:
            samples = [sequences[index] for index in batch.sample_ids]
            assert batch.arrays["tokens"].shape == batch.arrays["labels"].shape == (3, 2, 8)
            assert batch.arrays["tokens"].dtype == batch.arrays["labels"].dtype == torch.int64
            assert "documents" in batch.arrays
            assert batch.arrays["documents"].dtype == torch.int32
            assert np.array_equal(batch.arrays["tokens"].reshape(6, 8), [sample.tokens for sample in samples])
            assert np.array_equal(batch.arrays["labels"].reshape(6, 8), [sample.labels for sample in samples])
            documents: list[Any] = [sample.documents for sample in samples]
            assert np.array_equal(batch.arrays["documents"].reshape(6, 8), documents)
            assert batch.num_valid == int((batch.arrays["labels"] >= 0).sum()) < 6 * 8


def test_unequal_ranks_together_load_the_same_rows_in_the_same_order() -> None:
    one = DataShare(rank=0, dp=1, micro_batch=6, grad_accum=2)
    unequal = DataShare(rank=0, dp=3, micro_batch=1, grad_accum=2, rows=(1, 3, 2))
    assert unequal.global_batch == one.global_batch
    for step in range(3):
        parts = [unequal.of(rank).indices(step) for rank in range(3)]
        assert [part.shape for part in parts] == [(2, 1), (2, 3), (2, 2)]
        assert np.concatenate(parts, axis=1).tolist() == one.indices(step).tolist()


def test_without_isolation_every_label_counts_and_there_are_no_documents(shards: TokenShards) -> None:
    with Loader(Sequences(shards, 8, False, 0, 41), seed=0, share=ALONE, steps=1) as loader:
        batch = next(loader).to(torch.device("cpu"))
    assert "documents" not in batch.arrays
    assert batch.num_valid == 16


def test_a_rank_knows_the_samples_of_other_ranks(sequences: Sequences) -> None:
    shares = [DataShare(rank=rank, dp=3, micro_batch=2, grad_accum=2) for rank in range(3)]
    loaders = [Loader(sequences, seed=0, share=share, steps=5) for share in shares]
    assert loaders[0].samples(4, [1]) == loaders[1].sample_ids(4)
    assert loaders[0].samples(4, [0, 2]) == loaders[0].sample_ids(4) + loaders[2].sample_ids(4)
    for loader in loaders:
        loader.close()


def test_the_order_of_many_steps_is_that_of_each_step(sequences: Sequences) -> None:
    """It is computed for many steps at once, and may be asked for in any order, also beyond the last epoch."""
    share = DataShare(rank=1, dp=2, micro_batch=3, grad_accum=2)
    for epochs in (0.0, 60.5):
        feed = TokenFeed(sequences, seed=7, share=share, epochs=epochs)
        num_rows = round(epochs * len(sequences)) or math.inf
        for step in (0, 400, 169, 170, 171, 3, 206, 207):
            indices = share.indices(step).ravel()
            expected = positions(7, indices[indices < num_rows], len(sequences)) + sequences.first
            assert feed.samples(step, [1]) == tuple(expected.tolist())
            both = feed.samples(step, [0, 1])
            assert both[len(both) - len(expected) :] == feed.samples(step, [1])


def test_auto_adds_processes_when_the_trainer_waits_without_changing_batches(
    sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimaran.data.loader_tuner.WINDOW_SECONDS", 0.1)
    limits = LoaderLimits(cores=3, free_bytes=1 << 30)
    with Loader(sequences, seed=0, share=ALONE, steps=60) as loader:
        expected = [(batch.step, batch.sample_ids, batch.arrays["tokens"].tolist()) for batch in loader]
        assert loader.stats()["workers"] == 0
        assert not loader.changes
    found = []
    with Loader(like(Slow, sequences), seed=0, share=ALONE, steps=60, workers="auto", limits=limits) as loader:
        for batch in loader:
            found.append((batch.step, batch.sample_ids, batch.arrays["tokens"].tolist()))
            time.sleep(0.015)
        assert found == expected
        assert loader.stats()["waited_seconds"] > 0.2
    first = loader.changes[0]
    assert first.setting.workers == 3
    assert "spent waiting for batches" in first.reason
    assert len(loader.changes) <= 3


def test_a_fixed_number_of_processes_does_not_change(sequences: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimaran.data.loader_tuner.WINDOW_SECONDS", 0.05)
    with Loader(like(Slow, sequences), seed=0, share=ALONE, steps=20, workers=1, limits=LARGE_LIMITS) as loader:
        assert len(list(loader)) == 20
        assert not loader.changes
        assert loader.stats()["workers"] == 1


class MixedFeed:
    """A feed with arrays of many shapes and dtypes, some ragged, some empty; later batches are much larger."""

    share = ALONE

    def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
        at(step)
        draw = np.random.default_rng(step)
        arrays = {
            "tokens": draw.integers(0, 9, (1, 2, 8)),
            "patches": draw.integers(0, 255, (step**3 % 1000, 48), dtype=np.uint8),
            "grids": np.zeros((0, 2), dtype=np.int32),
            "flags": draw.random((1, 2)) > 0.5,
            "turned": draw.random((5, 3), dtype=np.float32).T,
        }
        offsets = {"patches": (0, step**3 % 1000), "grids": (0, 0)}
        bad = (BadSample(step, "torn"),) if step % 2 else ()
        metrics = {"waste": np.float64(step / 3)}
        return LoadedArrays(arrays=arrays, num_valid=step, offsets=offsets, metrics=metrics, bad=bad)

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        return (step,)

    def num_quarantined(self, step: int) -> int:
        return 0


@pytest.mark.parametrize("workers", [0, 2])
def test_all_arrays_of_a_feed_arrive_unchanged(workers: int) -> None:
    with AnyLoader(MixedFeed(), steps=30, workers=workers, limits=LARGE_LIMITS) as loader:
        batches = list(loader)
    for step, batch in enumerate(batches):
        load = MixedFeed().load(step, lambda _: None)
        assert (batch.step, batch.num_valid, batch.offsets, batch.bad) == (step, step, load.offsets, load.bad)
        assert batch.metrics == load.metrics
        assert batch.arrays.keys() == load.arrays.keys()
        for name, array in load.arrays.items():
            assert batch.arrays[name].numpy().dtype == array.dtype
            assert np.array_equal(batch.arrays[name].numpy(), array)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_loaded_while_the_trainer_computes(workers: int) -> None:
    third = multiprocessing.get_context("fork").Event()

    class SignallingFeed(MixedFeed):
        def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
            if step == 2:
                third.set()
            return super().load(step, at)

    with AnyLoader(SignallingFeed(), steps=10, workers=workers, limits=LARGE_LIMITS) as loader:
        next(loader)
        assert third.wait(timeout=10)  # the trainer did not request it


def test_two_processes_load_at_the_same_time() -> None:
    barrier = multiprocessing.get_context("fork").Barrier(2, timeout=10)

    class BarrierFeed(MixedFeed):
        def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
            if step < 2:
                barrier.wait()  # times out unless another process arrives
            return super().load(step, at)

    with AnyLoader(BarrierFeed(), steps=9, workers=2, limits=LARGE_LIMITS) as loader:
        assert [batch.step for batch in loader] == list(range(9))


def test_a_slow_step_does_not_block_the_other_process() -> None:
    """Step 2 waits for step 10, which round-robin assignment would give to the same process."""
    reached = multiprocessing.get_context("fork").Event()

    class UnevenFeed(MixedFeed):
        def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
            if step == 10:
                reached.set()
            assert step != 2 or reached.wait(timeout=60)
            return super().load(step, at)

    with AnyLoader(UnevenFeed(), steps=13, workers=2, limits=LARGE_LIMITS) as loader:
        loader._tuner.setting = replace(loader._tuner.setting, depth=13)
        assert [batch.step for batch in loader] == list(range(13))


class LargeFeed(MixedFeed):
    """One megabyte per step; records the steps that were started."""

    def __init__(self) -> None:
        self.started: list[int] = []

    def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
        self.started.append(step)
        return LoadedArrays(arrays={"tokens": np.zeros((1, 2, 1 << 16))}, num_valid=1)


def test_memory_limits_the_batches_loaded_ahead() -> None:
    feed = LargeFeed()
    limits = LoaderLimits(cores=1, free_bytes=4 << 20)  # a quarter of it is one batch
    with AnyLoader(feed, steps=9, limits=limits) as loader:
        next(loader)
        time.sleep(0.1)
        assert max(feed.started) <= 1
        assert [batch.step for batch in loader] == list(range(1, 9))


def test_batches_that_do_not_fit_in_memory_are_refused_before_the_first_step() -> None:
    with pytest.raises(UserError, match="T060: 4 loader processes and 6 batches ahead") as refusal:
        next(AnyLoader(LargeFeed(), steps=9, workers=4, limits=LoaderLimits(cores=4, free_bytes=16 << 20)))
    assert "set data.workers to auto" in refusal.value.fix
    with pytest.raises(UserError, match="T060: the loader and 2 batches"):
        next(AnyLoader(LargeFeed(), steps=9, workers="auto", limits=LoaderLimits(cores=4, free_bytes=1 << 20)))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("dp", [1, 2, 5])
def test_an_epoch_ends_at_the_same_step_on_all_ranks_and_its_last_batch_is_padded(
    sequences: Sequences, dp: int
) -> None:
    """2.5 epochs of 41 sequences: 102 rows in batches of 10."""
    seen: Counter[int] = Counter()
    valid = 0
    for rank in range(dp):
        share = DataShare(rank=rank, dp=dp, micro_batch=1, grad_accum=10 // dp)
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
