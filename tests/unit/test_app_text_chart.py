"""Charts in text."""

from trimaran.app import stacked_bar
from trimaran.app.show.text_chart import curve

BLANK = chr(0x2800)


def test_a_curve_has_the_requested_size() -> None:
    rows = curve([3.0, 2.0, 1.0], width=12, height=4)
    assert [len(row) for row in rows] == [12] * 4


def test_a_falling_curve_runs_from_the_top_left_to_the_bottom_right() -> None:
    rows = curve([9.0 - step for step in range(9)], width=8, height=3)
    top_left_dot, bottom_right_dot = 0x01, 0x80
    assert ord(rows[0][0]) & top_left_dot
    assert ord(rows[-1][-1]) & bottom_right_dot
    assert rows[0][-1] == rows[-1][0] == BLANK


def test_a_curve_has_no_gaps_between_its_columns() -> None:
    rows = curve([5.0, 1.0, 4.0, 1.0, 3.0], width=20, height=4)
    assert all(any(row[column] != BLANK for row in rows) for column in range(20))


def test_more_values_than_dots_are_averaged_not_dropped() -> None:
    spike_in_the_middle = [1.0] * 500 + [1000.0] + [1.0] * 500
    rows = curve(spike_in_the_middle, width=10, height=4)
    assert any(cell != BLANK for cell in rows[0])


def test_a_curve_without_values_is_blank() -> None:
    assert curve([], width=4, height=2) == ["    ", "    "]


def test_a_flat_curve_is_one_line() -> None:
    rows = curve([2.0] * 6, width=6, height=3)
    assert all(cell == BLANK for row in rows[1:] for cell in row)


def test_a_stacked_bar_is_full_despite_rounding() -> None:
    colors = dict.fromkeys(["a", "b", "c"], "red")
    for width in range(1, 40):
        assert len(stacked_bar({"a": 1.0, "b": 1.0, "c": 1.0}, colors, width=width)) == width
    assert not stacked_bar({}, {}, width=10)
