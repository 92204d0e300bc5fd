"""Dealing rows to ranks of unequal speed."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.core import RowSeconds, deal_rows


def line(fixed: float, per_row: float) -> RowSeconds:
    return lambda rows: fixed + per_row * rows


@pytest.mark.parametrize(
    ("total", "per_row", "rows"),
    [
        (12, [1.0, 0.5], (4, 8)),
        (16, [1.0, 1.0], (8, 8)),
        (16, [1.02, 1.0], (8, 8)),  # noise does not move a row
        (6, [3.0, 2.0, 1.0], (1, 2, 3)),
        (2, [1.0, 100.0], (1, 1)),
    ],
)
def test_rows_follow_the_speeds(total: int, per_row: list[float], rows: tuple[int, ...]) -> None:
    assert deal_rows(total, [line(0.0, each) for each in per_row]) == rows


def test_a_rank_gets_no_more_rows_than_it_has_memory_for() -> None:
    assert deal_rows(12, [line(0.0, 1.0), line(0.0, 0.5)], [None, 6]) == (6, 6)
    assert deal_rows(12, [line(0.0, 1.0), line(0.0, 0.5)], [5, 6]) is None
    assert deal_rows(1, [line(0.0, 1.0), line(0.0, 0.5)]) is None


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 5)), min_size=1, max_size=3), st.integers(3, 9))
def test_no_other_deal_has_a_faster_slowest_rank(lines: list[tuple[float, float]], total: int) -> None:
    seconds = [line(*each) for each in lines]
    rows = deal_rows(total, seconds)
    assert rows is not None
    assert sum(rows) == total

    def slowest(deal: tuple[int, ...]) -> float:
        return max(of_rank(num) for of_rank, num in zip(seconds, deal, strict=True))

    others = (deal for deal in product(range(1, total + 1), repeat=len(lines)) if sum(deal) == total)
    assert slowest(rows) <= min(map(slowest, others)) + 1e-9
