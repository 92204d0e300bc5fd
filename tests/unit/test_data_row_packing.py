"""Packing samples of different lengths into rows of one length."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks.mix import IMAGE_TOKEN, Mix

from tests.sample_table import Table
from trimaran.core import ImageRules, RowCost
from trimaran.data import (
    Batching,
    PackingRules,
    RowPacking,
    measure_samples,
    open_row_packing,
    pack_samples,
    slots_per_row,
)

RULES = ImageRules(patch=14, merge=2, image_token=IMAGE_TOKEN, max_pixels=768 * 28 * 28)
SMALL = ImageRules(patch=2, merge=2, image_token=IMAGE_TOKEN, min_pixels=16, max_pixels=16 * 16)


def packing_of(table: Mix | Table, seq_len: int, batching: Batching = "pack", **rules: object) -> RowPacking:
    images = RULES if isinstance(table, Mix) else SMALL
    packing_rules = PackingRules(seq_len=seq_len, batching=batching, images=images, **rules)  # type: ignore
    return pack_samples(table, np.arange(table.num_samples), measure_samples(table, images), packing_rules)


@pytest.fixture(scope="module")
def mix() -> Mix:
    return Mix(20_000)


def test_packed_rows_are_full_and_hold_every_sample_once(mix: Mix) -> None:
    packing = packing_of(mix, 4096)
    lengths = np.minimum(measure_samples(mix, RULES).lengths, 4096)
    used = np.add.reduceat(lengths[packing.samples], packing.offsets[:-1])
    assert used.max() <= 4096
    assert used.sum() / (len(packing) * 4096) > 0.99
    assert np.sort(packing.samples).tolist() == list(range(mix.num_samples))
    assert packing.num_truncated > 0
    assert not any(packing.left_out.values())


def test_packed_rows_mix_expensive_and_cheap_samples(mix: Mix) -> None:
    packing = packing_of(mix, 4096)
    sample_sizes = measure_samples(mix, RULES)
    cost = sample_sizes.extra_cost(RowCost(token_pair=1e-5, patch=0.3), 4096)
    rows = 4096 + np.add.reduceat(cost[packing.samples], packing.offsets[:-1])
    assert np.quantile(rows, 0.9) / rows.mean() < 1.15  # 1.23 if only the free space counts
    assert np.quantile(rows, 0.99) / rows.mean() < 1.25  # 1.36


def test_a_packing_depends_only_on_its_seed(mix: Mix) -> None:
    first, again, other = (packing_of(mix, 2048, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(first.samples, again.samples)
    assert np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.samples, other.samples)


def test_a_repeated_sample_is_packed_twice() -> None:
    table = Table([[1] * 5, [2] * 6, [3] * 4])
    packing = pack_samples(table, np.array([0, 0, 1, 2]), measure_samples(table, None), PackingRules(seq_len=8))
    assert sorted(packing.samples.tolist()) == [0, 0, 1, 2]


def test_a_long_sample_is_truncated_unless_that_cuts_an_image_or_the_last_target() -> None:
    image = [IMAGE_TOKEN]
    table = Table(
        [
            [1] * 40,  # its targets start at 13
            image + [1] * 8,  # the image has 16 tokens at the start
            [1] * 10 + image + [1] * 4,  # the image ends at 26
            [1] * 63,  # its targets start at 21; the first is predicted at 20
            [],
        ],
        [(16, 16), (16, 16)],
    )
    packing = packing_of(table, 20)
    assert sorted(packing.samples.tolist()) == [0, 1]
    assert packing.num_truncated == 2
    assert packing.left_out == {"an image would be cut": 1, "no target would be left": 1, "it is empty": 1}


def test_without_a_usable_sample_there_are_no_rows() -> None:
    for batching in ("pack", "bucket", "pad"):
        assert len(packing_of(Table([[], []]), 20, batching)) == 0


def test_a_bucket_row_has_samples_of_similar_length(mix: Mix) -> None:
    packing = packing_of(mix, 4096, "bucket")
    lengths = np.minimum(measure_samples(mix, RULES).lengths, 4096)[packing.samples]
    assert np.sort(packing.samples).tolist() == list(range(mix.num_samples))
    counts = np.diff(packing.offsets)
    longest = np.maximum.reduceat(lengths, packing.offsets[:-1])
    shortest = np.minimum.reduceat(lengths, packing.offsets[:-1])
    slots = slots_per_row(longest, 4096)
    assert (counts <= slots).all()
    assert (slots_per_row(shortest, 4096) == slots).all()
    assert (counts < slots).sum() <= len(np.unique(slots))  # only the last row of each bucket may be partly filled


def test_a_bucket_whose_rows_are_all_full_has_no_empty_row() -> None:
    packing = packing_of(Table([[1] * 4, [2] * 4, [3] * 4, [4] * 4]), 8, "bucket")
    assert np.diff(packing.offsets).tolist() == [2, 2]


def test_padding_puts_one_sample_in_each_row() -> None:
    packing = packing_of(Table([[1] * 5, [2] * 6, [3] * 4]), 8, "pad")
    assert np.diff(packing.offsets).tolist() == [1, 1, 1]
    assert sorted(packing.samples.tolist()) == [0, 1, 2]


def test_a_packing_is_cached_and_read_again(tmp_path: Path) -> None:
    table = Table([[1] * length for length in range(1, 60)])
    ids, sample_sizes = np.arange(59), measure_samples(table, None)
    first = open_row_packing(table, ids, sample_sizes, PackingRules(seq_len=64), folder=tmp_path / "charts")
    (file,) = (tmp_path / "charts").iterdir()
    # Other sizes would give another packing, so equality shows that the cache was read.
    other_sizes = measure_samples(Table([[1]] * 59), None)
    again = open_row_packing(table, ids, other_sizes, PackingRules(seq_len=64), folder=tmp_path / "charts")
    assert np.array_equal(first.samples, again.samples)
    assert np.array_equal(first.offsets, again.offsets)
    assert first.left_out == again.left_out
    other = open_row_packing(table, ids, sample_sizes, PackingRules(seq_len=64, seed=1), folder=tmp_path / "charts")
    assert not np.array_equal(first.samples, other.samples)
    assert len(list((tmp_path / "charts").iterdir())) == 2
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    repacked = open_row_packing(table, ids, sample_sizes, PackingRules(seq_len=64), folder=tmp_path / "charts")
    assert np.array_equal(first.samples, repacked.samples)


def test_a_cache_that_cannot_be_written_does_not_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    table = Table([[1] * 5])
    folder = tmp_path / "file" / "charts"
    packing = open_row_packing(
        table, np.arange(1), measure_samples(table, None), PackingRules(seq_len=8), folder=folder
    )
    assert len(packing) == 1
