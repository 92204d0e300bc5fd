"""Who trains on which rows when elastic replicas are lost and join: every row counts once, and none is left out."""

import random

import numpy as np
import pytest

from trimaran.data import DataShare, Deal, RowLedger, spans_of

EVERY = 4
ONE_RANK = DataShare(rank=0, dp=1, micro_batch=2, grad_accum=1)


def ledger(*, micro_batch: int = 2, grad_accum: int = 1, dp: int = 1, replicas: int = 3) -> RowLedger:
    share = DataShare(rank=0, dp=dp, micro_batch=micro_batch, grad_accum=grad_accum)
    made = RowLedger(share, global_batch=replicas * share.global_batch)
    made.begin(0, range(replicas))
    return made


def rows_of(each: RowLedger, member: int, steps: range, share: DataShare = ONE_RANK) -> list[int]:
    """Return the rows of all ranks of a replica, in these steps."""
    return each.dealt_share(member, share).rows_of(steps, range(share.dp)).ravel().tolist()


@pytest.mark.parametrize(("dp", "grad_accum"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_a_healthy_run_has_the_rows_of_one_that_is_not_elastic(dp: int, grad_accum: int) -> None:
    each = ledger(dp=dp, grad_accum=grad_accum)
    for step in range(0, 3 * EVERY, EVERY):
        for member in range(3):
            for rank in range(dp):
                plain = DataShare(rank=member * dp + rank, dp=3 * dp, micro_batch=2, grad_accum=grad_accum)
                share = DataShare(rank=rank, dp=dp, micro_batch=2, grad_accum=grad_accum)
                steps = range(step, step + EVERY)
                ours = each.dealt_share(member, share).rows_of(steps, [rank])
                assert ours.tolist() == plain.rows_of(steps, [plain.rank]).tolist()
        before = each.deal
        assert each.synchronise(step + EVERY, range(3), range(3)) == 0
        assert before is not None
        assert each.continues(before)


def test_the_rows_of_a_lost_replica_are_dealt_out_first() -> None:
    each = ledger()
    lost = rows_of(each, 1, range(EVERY))
    before = each.deal
    assert each.synchronise(EVERY, [0, 2], [0, 2]) == len(lost) == 8
    assert before is not None
    assert not each.continues(before)
    dealt = [row for member in (0, 2) for row in rows_of(each, member, range(EVERY, 2 * EVERY))]
    assert {*lost} < {*dealt}
    assert sorted({*dealt} - {*lost}) == list(range(24, 32))


def test_a_lost_replica_that_had_rows_of_a_lost_one_returns_them_again() -> None:
    each = ledger()
    first = rows_of(each, 1, range(EVERY))
    each.synchronise(EVERY, [0, 2], [0, 2])
    second = rows_of(each, 2, range(EVERY, 2 * EVERY))
    assert {*first} & {*second}
    each.synchronise(2 * EVERY, [0], [0, 1])
    assert each.returned == spans_of(np.array(sorted(second)))


@pytest.mark.parametrize("seed", range(5))
def test_every_row_counts_once_whoever_is_lost_and_joins(seed: int) -> None:
    chance, each = random.Random(seed), ledger(micro_batch=3, grad_accum=2, dp=2)
    two_ranks = DataShare(rank=0, dp=2, micro_batch=3, grad_accum=2)
    members, consumed = [0, 1, 2], list[int]()
    for step in range(0, 20 * EVERY, EVERY):
        survivors = [member for member in members if chance.random() > 0.3] or [chance.choice(members)]
        for member in survivors:
            consumed += rows_of(each, member, range(step, step + EVERY), two_ranks)
        members = sorted({*survivors, *(member for member in range(3) if chance.random() > 0.5)})
        each.synchronise(step + EVERY, survivors, members)
    waiting = [row for start, stop in each.returned for row in range(start, stop)]
    assert len(consumed) == len({*consumed})
    assert sorted([*consumed, *waiting]) == list(range(each.next_row))


def test_a_saved_ledger_continues_with_the_rows_that_were_not_consumed() -> None:
    each, again = ledger(), ledger()
    each.synchronise(EVERY, [0], [0])
    again.restore(each.state())
    again.begin(EVERY, range(3))
    dealt = [row for member in range(3) for row in rows_of(again, member, range(EVERY, 2 * EVERY))]
    assert len(dealt) == len({*dealt}) == 24
    assert {*rows_of(ledger(), 1, range(EVERY)), *rows_of(ledger(), 2, range(EVERY))} < {*dealt}


def test_a_state_of_another_plan_continues_at_its_step() -> None:
    each = RowLedger(DataShare(rank=0, dp=1, micro_batch=2, grad_accum=1), global_batch=6)
    each.begin(10, range(3))
    assert each.next_row == 60


@pytest.mark.parametrize("spans", [[[4, 2]], [[0, 4], [3, 6]], [[-1, 2]]])
def test_rows_out_of_order_are_not_restored(spans: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="out of order"):
        ledger().restore({"next_row": 0, "returned": spans})


def test_rows_are_kept_as_ranges() -> None:
    assert spans_of(np.array([7, 3, 4, 5, 9])) == ((3, 6), (7, 8), (9, 10))
    assert spans_of(np.array([], dtype=np.int64)) == ()
    deal = Deal(first_step=0, members=(0,), rows_per_step=1, next_row=20, returned=((3, 6), (9, 10)))
    assert deal.rows(np.arange(6)).tolist() == [3, 4, 5, 9, 20, 21]
