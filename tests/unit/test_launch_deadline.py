"""How long a rank may stay in a section before it counts as hung."""

from typing import Any

import pytest

from trimaran.core import FaultsSection
from trimaran.launch import Deadlines
from trimaran.runs import Heartbeat


def heartbeat(section: Any, step: int, entered: float) -> Heartbeat:
    return Heartbeat(section=section, step=step, entered=entered, alive=entered, answered=0)


def after_steps(seconds: float, *, every: int = 1, hang_seconds: float = 6.0) -> Deadlines:
    """Deadlines that have seen 40 steps of `seconds` each, polled once every `every` steps."""
    deadlines = Deadlines(FaultsSection(hang_seconds=hang_seconds))
    for step in range(0, 40 * every, every):
        deadlines.overdue({0: heartbeat("step", step, step * seconds)}, step * seconds)
    return deadlines


def test_a_short_step_hangs_after_hang_seconds() -> None:
    assert after_steps(0.05).of("step") == 6.0


def test_a_long_step_may_take_five_median_steps() -> None:
    assert after_steps(4.0).of("step") == 20.0


def test_steps_between_two_polls_are_counted_one_by_one() -> None:
    assert after_steps(4.0, every=5).of("step") == 20.0


@pytest.mark.parametrize("section", ["first", "evaluation", "sampling", "copy"])
def test_units_of_the_same_work_get_start_seconds_first_and_ten_times_the_longest_later(section: Any) -> None:
    deadlines = Deadlines(FaultsSection(start_seconds=900))
    assert deadlines.of(section) == 900
    deadlines.overdue({0: heartbeat(section, 4, 110.0)}, 110.0)
    deadlines.overdue({0: heartbeat("step", 5, 110.5)}, 110.5)
    assert deadlines.of(section) == 30
    deadlines.overdue({0: heartbeat(section, 5, 120.0)}, 120.0)
    deadlines.overdue({0: heartbeat(section, 5, 127.0)}, 127.0)
    assert deadlines.of(section) == 70


def test_the_first_step_of_another_plan_may_compile() -> None:
    deadlines = after_steps(0.5)
    deadlines.overdue({0: heartbeat("first", 40, 20.0)}, 20.0)
    deadlines.overdue({0: heartbeat("step", 41, 21.0)}, 21.0)
    assert deadlines.of("first") == 30
    deadlines.overdue({0: heartbeat("restore", 41, 22.0)}, 22.0)
    deadlines.overdue({0: heartbeat("first", 42, 23.0)}, 23.0)
    assert deadlines.of("first") == FaultsSection().start_seconds


@pytest.mark.parametrize("section", ["start", "save", "restore", "load", "prepare", "export", "compile", "data"])
def test_a_short_read_write_or_compilation_does_not_shorten_the_deadline_of_the_next(section: Any) -> None:
    deadlines = Deadlines(FaultsSection(start_seconds=900))
    deadlines.overdue({0: heartbeat(section, 3, 100.0)}, 100.0)
    deadlines.overdue({0: heartbeat("step", 4, 100.1)}, 100.1)
    assert deadlines.of(section) == 900


def test_the_end_of_a_step_after_a_copy_or_an_evaluation_does_not_count_as_a_short_step() -> None:
    deadlines = Deadlines(FaultsSection(hang_seconds=6.0))
    for step in range(30):
        began = 10.0 * step
        for section, at, after in (
            ("step", step, 0.0),
            ("copy", step + 1, 9.0),
            ("step", step, 9.1),
            ("evaluation", step + 1, 9.2),
            ("data", step + 1, 9.3),
            ("evaluation", step + 1, 9.4),
            ("step", step, 9.8),
            ("data", step + 1, 9.9),
        ):
            deadlines.overdue({0: heartbeat(section, at, began + after)}, began + after)
    assert deadlines.of("step") == pytest.approx(5 * 9.3)


def test_steps_after_a_rewind_are_learnt_too() -> None:
    deadlines = Deadlines(FaultsSection(hang_seconds=6.0))
    deadlines.overdue({0: heartbeat("step", 50, 100.0)}, 100.0)
    for step in range(40, 62):
        deadlines.overdue({0: heartbeat("step", step, 4.0 * step)}, 4.0 * step)
    assert deadlines.of("step") == 20.0


def test_only_ranks_past_their_deadline_are_overdue() -> None:
    deadlines = after_steps(0.05)
    now = 100.0
    overdue = deadlines.overdue(
        {0: heartbeat("step", 50, now - 7), 1: heartbeat("step", 51, now - 5), 2: heartbeat("save", 50, now - 7)}, now
    )
    assert overdue == {0: 7.0}


def test_a_slow_rank_that_makes_progress_is_not_overdue() -> None:
    deadlines = after_steps(0.05)
    for step in range(40, 60):
        assert deadlines.overdue({0: heartbeat("step", step, step * 3.0)}, step * 3.0 + 2.9) == {}


def test_silence_while_the_supervisor_did_not_poll_does_not_count() -> None:
    deadlines = after_steps(0.05)
    hung = {0: heartbeat("step", 50, 10.0)}
    deadlines.note_pause(500.0)
    assert deadlines.overdue(hung, 505.0) == {}
    assert deadlines.overdue(hung, 507.0) == {0: 7.0}


def test_ranks_that_were_stopped_with_the_supervisor_get_the_same_time_as_after_their_last_heartbeat() -> None:
    deadlines = after_steps(0.05)
    assert deadlines.counted_silence(10.0, 16.5) == 6.5
    deadlines.note_pause(24.0)
    assert deadlines.counted_silence(10.0, 26.0) == 2.0, "the ranks are continued 2 s after the supervisor"
    assert deadlines.counted_silence(25.0, 31.5) == 6.5


def test_repeated_pauses_of_the_supervisor_do_not_excuse_silence_forever() -> None:
    deadlines = after_steps(0.05)
    hung = {0: heartbeat("step", 50, 10.0)}
    overdue = []
    for now in (20.0, 25.0, 30.0):
        deadlines.note_pause(now)
        overdue.append(deadlines.overdue(hung, now + 0.1))
    assert overdue == [{}, {}, {0: pytest.approx(20.1)}]
    assert deadlines.overdue({0: heartbeat("step", 51, 26.0)}, 33.0) == {}


def test_new_ranks_keep_the_durations_learnt_from_earlier_ones() -> None:
    deadlines = after_steps(4.0)
    deadlines.forget()
    deadlines.overdue({0: heartbeat("start", 0, 900.0)}, 900.0)
    assert deadlines.of("step") == 20.0


def test_a_rank_that_waits_for_a_core_is_not_hung_and_neither_are_ranks_that_wait_for_it() -> None:
    deadlines = after_steps(0.05)
    hung = {rank: heartbeat("step", 41, 500.0) for rank in range(2)}
    assert deadlines.overdue(hung, 500.0, {0: 2.0, 1: 3.0}) == {}
    assert deadlines.overdue(hung, 507.0, {0: 2.0, 1: 8.0}) == {}
    assert deadlines.overdue(hung, 512.0, {0: 2.0, 1: 8.0}) == {0: 7.0, 1: 7.0}


def test_a_rank_that_just_ended_is_not_overdue_for_its_earlier_waits_for_a_core() -> None:
    deadlines = after_steps(0.1)
    hung = {0: heartbeat("step", 50, 500.0)}
    assert deadlines.overdue(hung, 501.0, {0: 100.0}) == {}
    assert deadlines.overdue(hung, 502.0, {0: 0.0}) == {}, "/proc no longer has it"
