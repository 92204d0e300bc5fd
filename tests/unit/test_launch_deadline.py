"""How long a rank may stand still."""

from typing import Any

import pytest

from trimaran.core import FaultsSection
from trimaran.launch.deadline import Deadlines
from trimaran.run import Heartbeat


def heartbeat(section: Any, step: int, entered: float) -> Heartbeat:
    return Heartbeat(section=section, step=step, entered=entered, alive=entered, answered=0)


def after_steps(seconds: float, *, every: int = 1, hang_seconds: float = 6.0) -> Deadlines:
    """Deadlines that have seen 40 steps of `seconds` each, one look in `every` steps."""
    deadlines = Deadlines(FaultsSection(hang_seconds=hang_seconds))
    for step in range(0, 40 * every, every):
        deadlines.late({0: heartbeat("step", step, step * seconds)}, step * seconds)
    return deadlines


def test_a_short_step_has_hung_after_the_recipes_seconds() -> None:
    assert after_steps(0.05).of("step") == 6.0


def test_a_long_step_may_take_five_times_the_usual_one() -> None:
    assert after_steps(4.0).of("step") == 20.0


def test_steps_that_passed_between_two_looks_are_counted_each() -> None:
    assert after_steps(4.0, every=5).of("step") == 20.0


def test_everything_else_gets_long_the_first_time_and_ten_times_the_longest_later() -> None:
    deadlines = Deadlines(FaultsSection(start_seconds=900))
    assert deadlines.of("save") == 900
    deadlines.late({0: heartbeat("save", 3, 100.0)}, 100.0)
    deadlines.late({0: heartbeat("step", 4, 107.0)}, 107.0)
    assert deadlines.of("save") == 70
    deadlines.late({0: heartbeat("evaluation", 4, 110.0)}, 110.0)
    deadlines.late({0: heartbeat("step", 5, 110.5)}, 110.5)
    assert deadlines.of("evaluation") == 30


def test_only_ranks_past_their_deadline_are_late() -> None:
    deadlines = after_steps(0.05)
    now = 100.0
    late = deadlines.late(
        {0: heartbeat("step", 50, now - 7), 1: heartbeat("step", 51, now - 5), 2: heartbeat("save", 50, now - 7)}, now
    )
    assert late == {0: 7.0}


def test_a_slow_rank_that_moves_is_not_late() -> None:
    deadlines = after_steps(0.05)
    for step in range(40, 60):
        assert deadlines.late({0: heartbeat("step", step, step * 3.0)}, step * 3.0 + 2.9) == {}


def test_silence_while_nobody_looked_does_not_count() -> None:
    deadlines = after_steps(0.05)
    still = {0: heartbeat("step", 50, 10.0)}
    deadlines.excuse(500.0)
    assert deadlines.late(still, 505.0) == {}
    assert deadlines.late(still, 507.0) == {0: 7.0}


def test_who_naps_again_and_again_does_not_excuse_a_silence_for_ever() -> None:
    deadlines = after_steps(0.05)
    still = {0: heartbeat("step", 50, 10.0)}
    late = []
    for now in (20.0, 25.0, 30.0):
        deadlines.excuse(now)
        late.append(deadlines.late(still, now + 0.1))
    assert late == [{}, {}, {0: pytest.approx(20.1)}]
    assert deadlines.late({0: heartbeat("step", 51, 26.0)}, 33.0) == {}


def test_new_ranks_start_with_what_was_learnt_of_the_old() -> None:
    deadlines = after_steps(4.0)
    deadlines.start()
    deadlines.late({0: heartbeat("start", 0, 900.0)}, 900.0)
    assert deadlines.of("step") == 20.0


def test_a_wait_for_data_is_left_to_the_loaders_own_deadlines() -> None:
    deadlines = Deadlines(FaultsSection(start_seconds=900))
    deadlines.late({0: heartbeat("data", 3, 100.0)}, 100.0)
    deadlines.late({0: heartbeat("step", 3, 100.1)}, 100.1)
    assert deadlines.of("data") == 900


def test_a_rank_that_waits_for_a_core_has_not_hung_and_neither_have_those_that_wait_for_it() -> None:
    deadlines = after_steps(0.05)
    still = {rank: heartbeat("step", 41, 500.0) for rank in range(2)}
    assert deadlines.late(still, 500.0, {0: 2.0, 1: 3.0}) == {}
    assert deadlines.late(still, 507.0, {0: 2.0, 1: 8.0}) == {}
    assert deadlines.late(still, 512.0, {0: 2.0, 1: 8.0}) == {0: 7.0, 1: 7.0}


def test_a_rank_that_has_just_ended_is_not_late_for_all_that_it_waited_for_a_core() -> None:
    deadlines = after_steps(0.1)
    still = {0: heartbeat("step", 50, 500.0)}
    assert deadlines.late(still, 501.0, {0: 100.0}) == {}
    assert deadlines.late(still, 502.0, {0: 0.0}) == {}, "the system forgot it"


def test_what_is_compiled_may_always_take_long() -> None:
    deadlines = Deadlines(FaultsSection(start_seconds=900))
    deadlines.late({0: heartbeat("compile", 4, 110.0)}, 110.0)
    deadlines.late({0: heartbeat("step", 4, 110.5)}, 110.5)
    assert deadlines.of("compile") == 900
