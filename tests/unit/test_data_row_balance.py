"""The assignment of the rows of a global batch by cost."""

import numpy as np
import pytest
from benchmarks.mix import IMAGE_TOKEN, Mix

from trimaran.core import ImageRules, RowCost
from trimaran.data import (
    NO_ROW,
    DataShare,
    PackingRules,
    balance_rows,
    measure_samples,
    pack_samples,
    positions,
    sequential_rows,
    slowest_rank_cost,
)

RULES = ImageRules(patch=14, merge=2, image_token=IMAGE_TOKEN, max_pixels=768 * 28 * 28)
COSTS = {  # vision and language parameters: 0.7 B and 7 B, 6 B and 20 B, 0.7 B and 1.5 B
    "7b": RowCost(token_pair=1.4e-5, patch=0.09, patch_pair=1.2e-5),
    "26b": RowCost(token_pair=1e-5, patch=0.3, patch_pair=1e-5),
    "2b": RowCost(token_pair=5e-5, patch=0.4, patch_pair=6e-5),
}


def share_of(dp: int, micro_batch: int, rows: int) -> DataShare:
    return DataShare(rank=0, dp=dp, micro_batch=micro_batch, grad_accum=rows // dp // micro_batch)


@pytest.mark.parametrize("share", [share_of(8, 1, 64), share_of(4, 4, 64), share_of(64, 1, 64), share_of(1, 8, 64)])
def test_every_row_is_assigned_once(share: DataShare) -> None:
    costs = np.random.default_rng(0).lognormal(size=64)
    assignment = balance_rows(costs, share)
    assert assignment.shape == (share.grad_accum, share.dp, share.micro_batch)
    assert sorted(assignment.ravel().tolist()) == list(range(64))
    assert np.array_equal(assignment, balance_rows(costs, share))


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize(("dp", "micro_batch"), [(8, 1), (8, 4), (64, 1), (64, 2)])
def test_the_slowest_rank_is_within_five_percent_of_the_mean(
    name: str, dp: int, micro_batch: int, rows: tuple[np.ndarray, np.ndarray, Mix]
) -> None:
    offsets, samples, mix = rows
    extra_cost = measure_samples(mix, RULES).extra_cost(COSTS[name], 4096)
    costs = 4096 + np.add.reduceat(extra_cost[samples], offsets[:-1])
    share = share_of(dp, micro_batch, 512)
    for step in range(3):
        batch = costs[positions(0, np.arange(512) + 512 * step, len(costs))]
        assert slowest_rank_cost(batch, balance_rows(batch, share)) < 1.05 * batch.sum() / dp
        totals = batch[balance_rows(batch, share)].sum((0, 2))
        assert totals.max() / totals.mean() < 1.02


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray, Mix]:
    mix = Mix(20_000)
    rules = PackingRules(seq_len=4096, images=RULES)
    packing = pack_samples(mix, np.arange(mix.num_samples), measure_samples(mix, RULES), rules)
    return packing.offsets, packing.samples, mix


def test_without_balance_the_slowest_rank_is_further_from_the_mean(rows: tuple[np.ndarray, np.ndarray, Mix]) -> None:
    offsets, samples, mix = rows
    extra_cost = measure_samples(mix, RULES).extra_cost(COSTS["26b"], 4096)
    batch = (4096 + np.add.reduceat(extra_cost[samples], offsets[:-1]))[:512]
    share = share_of(64, 1, 512)
    assert slowest_rank_cost(batch, sequential_rows(share)) > 1.05 * slowest_rank_cost(
        batch, balance_rows(batch, share)
    )


def test_a_micro_step_has_rows_of_similar_cost_and_rank_totals_are_equal() -> None:
    costs = np.array([1.0, 9.0, 2.0, 8.0, 1.5, 8.5, 2.5, 9.5])
    assigned = costs[balance_rows(costs, share_of(2, 1, 8))][:, :, 0]
    assert assigned.tolist() == [[9.5, 9.0], [8.0, 8.5], [2.5, 2.0], [1.0, 1.5]]
    assert assigned.sum(0).tolist() == [21.0, 21.0]


def test_without_balance_rows_are_assigned_in_order() -> None:
    share = DataShare(rank=1, dp=2, micro_batch=3, grad_accum=2)
    assert np.array_equal(sequential_rows(share)[:, 1], share.indices(0))


@pytest.mark.parametrize("seed", range(3))
def test_unequal_ranks_get_their_number_of_rows_and_a_fair_part_of_the_cost(seed: int) -> None:
    share = DataShare(rank=0, dp=3, micro_batch=1, grad_accum=4, rows=(1, 2, 5))
    costs = np.random.default_rng(seed).integers(90, 110, share.global_batch).astype(float)
    for assignment in (balance_rows(costs, share), sequential_rows(share)):
        assert [(assignment[:, rank] != NO_ROW).sum(-1).tolist() for rank in range(3)] == [[1] * 4, [2] * 4, [5] * 4]
        assert sorted(assignment[assignment != NO_ROW].tolist()) == list(range(share.global_batch))
    balanced = slowest_rank_cost(costs, balance_rows(costs, share))
    mean = costs.sum() / share.dp
    assert mean <= balanced <= slowest_rank_cost(costs, sequential_rows(share))
    assert balanced <= 1.15 * mean
