"""From measured seconds to the rows of each data rank."""

import pytest

from trimaran.core import UserError
from trimaran.train import RoundTime, rows_by_speed, rows_in


def test_rows_follow_all_measurements() -> None:
    first = [RoundTime(6, 6.0), RoundTime(6, 3.0)]
    assert rows_by_speed([first], 12) == (4, 8)
    second = [RoundTime(4, 4.4), RoundTime(8, 3.6)]
    assert rows_by_speed([first, second], 12) == (4, 8)
    disturbed = [RoundTime(4, 2.4), RoundTime(8, 4.0)]
    assert rows_by_speed([first, disturbed], 12) == (4, 8)


def test_a_rank_that_is_full_leaves_rows_to_the_others() -> None:
    measured = [RoundTime(6, 6.0, 9), RoundTime(6, 3.0, 7)]
    assert rows_by_speed([measured], 12) == (5, 7)
    with pytest.raises(UserError, match="memory for 9 rows at a time, and 12 are needed") as refused:
        rows_by_speed([[RoundTime(6, 6.0, 4), RoundTime(6, 3.0, 5)]], 12)
    assert refused.value.code == "P024"


def test_rows_in_memory_are_at_least_one() -> None:
    assert rows_in(10.0, 2, row_bytes=4.0) == 5
    assert rows_in(-3.0, 2, row_bytes=4.0) == 1
    assert rows_in(10.0, 2, row_bytes=0.0) == 20
