"""The order of samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.data import position, positions

seeds = st.integers(0, 2**63 - 1)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, epoch=st.integers(0, 2**20), length=st.integers(1, 3000))
def test_every_epoch_sees_each_sample_exactly_once(seed: int, epoch: int, length: int) -> None:
    order = positions(seed, np.arange(epoch * length, (epoch + 1) * length), length)
    assert np.array_equal(np.sort(order), np.arange(length))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 16, 17, 64, 65, 4093, 4096, 4097, 65536, 65537])
def test_edge_case_lengths_are_permuted(length: int) -> None:
    assert len(set(positions(0, np.arange(length), length).tolist())) == length


@settings(max_examples=30, deadline=None)
@given(seed=seeds, length=st.integers(1, 2**50), start=st.integers(0, 2**40))
def test_single_and_batched_positions_agree(seed: int, length: int, start: int) -> None:
    together = positions(seed, np.arange(start, start + 20), length)
    assert [position(seed, start + offset, length) for offset in range(20)] == together.tolist()
    assert together.min() >= 0
    assert together.max() < length


def test_epochs_and_seeds_differ() -> None:
    first = positions(1, np.arange(1000), 1000)
    for other in (positions(1, np.arange(1000, 2000), 1000), positions(2, np.arange(1000), 1000), np.arange(1000)):
        assert (first == other).mean() < 0.02


@pytest.mark.parametrize("length", [2, 10, 97, 1000])
def test_every_sample_is_equally_likely_at_any_position(length: int) -> None:
    expected = 100
    for offset in (0, length // 2, length - 1):
        samples = positions(3, np.arange(expected * length) * length + offset, length)
        chi_square = ((np.bincount(samples, minlength=length) - expected) ** 2 / expected).sum()
        assert chi_square < length + 4 * (2 * length) ** 0.5


def test_every_permutation_of_four_samples_is_equally_likely() -> None:
    epochs = positions(0, np.arange(4 * 24 * 100), 4).reshape(-1, 4)
    _, counts = np.unique(epochs, axis=0, return_counts=True)
    assert len(counts) == 24
    assert ((counts - 100) ** 2 / 100).sum() < 24 + 4 * 48**0.5


def test_the_order_never_changes_between_versions() -> None:
    """A run that resumes after an upgrade must continue with the samples it has not seen."""
    assert positions(7, np.arange(12), 10).tolist() == [1, 7, 2, 4, 3, 0, 6, 8, 9, 5, 5, 8]
    assert position(2**62 + 5, 10**15, 10**9 + 7) == 911911144
