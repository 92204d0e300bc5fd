"""The rows of a global batch, dealt out by cost."""

import numpy as np
import pytest
from benchmarks.mix import IMAGE_TOKEN, Mix

from trimaran.core import ImageRules, RowCost
from trimaran.data.feed import DataShare
from trimaran.data.row_balance import deal_rows, in_order, slowest
from trimaran.data.row_packing import PackingRules, pack_samples
from trimaran.data.sample_costs import measure
from trimaran.data.sample_order import positions

RULES = ImageRules(patch=14, merge=2, image_token=IMAGE_TOKEN, max_pixels=768 * 28 * 28)
COSTS = {  # of a tower of 0.7 B before 7 B, of 6 B before 20 B, and of 0.7 B before 1.5 B
    "7b": RowCost(token_pair=1.4e-5, patch=0.09, patch_pair=1.2e-5),
    "26b": RowCost(token_pair=1e-5, patch=0.3, patch_pair=1e-5),
    "2b": RowCost(token_pair=5e-5, patch=0.4, patch_pair=6e-5),
}


def share_of(dp: int, micro_batch: int, rows: int) -> DataShare:
    return DataShare(rank=0, dp=dp, micro_batch=micro_batch, grad_accum=rows // dp // micro_batch)


@pytest.mark.parametrize("share", [share_of(8, 1, 64), share_of(4, 4, 64), share_of(64, 1, 64), share_of(1, 8, 64)])
def test_every_row_has_one_place(share: DataShare) -> None:
    costs = np.random.default_rng(0).lognormal(size=64)
    places = deal_rows(costs, share)
    assert places.shape == (share.grad_accum, share.dp, share.micro_batch)
    assert sorted(places.ravel().tolist()) == list(range(64))
    assert np.array_equal(places, deal_rows(costs, share))


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize(("dp", "micro_batch"), [(8, 1), (8, 4), (64, 1), (64, 2)])
def test_the_slowest_rank_is_within_five_percent_of_the_mean(
    name: str, dp: int, micro_batch: int, rows: tuple[np.ndarray, np.ndarray, Mix]
) -> None:
    offsets, samples, mix = rows
    excess = measure(mix, RULES).excess(COSTS[name], 4096)
    costs = 4096 + np.add.reduceat(excess[samples], offsets[:-1])
    share = share_of(dp, micro_batch, 512)
    for step in range(3):
        batch = costs[positions(0, np.arange(512) + 512 * step, len(costs))]
        assert slowest(batch, deal_rows(batch, share)) < 1.05 * batch.sum() / dp
        totals = batch[deal_rows(batch, share)].sum((0, 2))
        assert totals.max() / totals.mean() < 1.02


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray, Mix]:
    mix = Mix(20_000)
    rules = PackingRules(seq_len=4096, images=RULES)
    chart = pack_samples(mix, np.arange(mix.num_samples), measure(mix, RULES), rules)
    return chart.offsets, chart.samples, mix


def test_without_balance_the_slowest_is_further_from_the_mean(rows: tuple[np.ndarray, np.ndarray, Mix]) -> None:
    offsets, samples, mix = rows
    excess = measure(mix, RULES).excess(COSTS["26b"], 4096)
    batch = (4096 + np.add.reduceat(excess[samples], offsets[:-1]))[:512]
    share = share_of(64, 1, 512)
    assert slowest(batch, in_order(share)) > 1.05 * slowest(batch, deal_rows(batch, share))


def test_ranks_in_step_get_rows_of_about_one_cost_and_all_the_same_in_sum() -> None:
    costs = np.array([1.0, 9.0, 2.0, 8.0, 1.5, 8.5, 2.5, 9.5])
    dealt = costs[deal_rows(costs, share_of(2, 1, 8))][:, :, 0]
    assert dealt.tolist() == [[9.5, 9.0], [8.0, 8.5], [2.5, 2.0], [1.0, 1.5]]
    assert dealt.sum(0).tolist() == [21.0, 21.0]


def test_without_balance_rows_stay_where_the_plan_puts_them() -> None:
    share = DataShare(rank=1, dp=2, micro_batch=3, grad_accum=2)
    assert np.array_equal(in_order(share)[:, 1], share.indices(0))
