"""What is done about trouble, by cause and by progress."""

from typing import Any

import pytest

from trimaran.core import EXIT_AGAIN, EXIT_STUCK, EXIT_USER, FaultsSection, Incident
from trimaran.launch.policy import EXIT_FAULT, Cycle, Means, PolicyDecision, decide

MEANS = Means(world_size=4)


def cycle(*, cause: Any = "crash", new_steps: int = 0, action: Any = None, **known: Any) -> Cycle:
    fields: dict[str, Any] = {"step": 7, "suspects": (1,)} | known
    incident = Incident(id="i-0001", cause=cause, time=0.0, what="it broke", action=action, **fields)
    return Cycle(incident=incident, new_steps=new_steps)


def spoilt(*samples: int, action: Any = None) -> Cycle:
    return cycle(cause="data", evidence={"sample_ids": list(samples)}, action=action)


def answer(*cycles: Cycle, means: Means = MEANS, **faults: Any) -> PolicyDecision:
    return decide(cycles, FaultsSection(**faults), means)


@pytest.mark.parametrize("cause", ["crash", "exit", "hang", "mismatch", "network", "host", "storage", "unknown"])
def test_most_trouble_is_answered_by_a_restart(cause: str) -> None:
    assert answer(cycle(cause=cause, new_steps=3)).action == "restarted"


@pytest.mark.parametrize(("cause", "code"), [("user", EXIT_USER), ("preempted", EXIT_AGAIN), ("numeric", EXIT_STUCK)])
def test_some_causes_are_no_better_after_a_restart(cause: str, code: int) -> None:
    course = answer(cycle(cause=cause, new_steps=3))
    assert (course.action, course.code) == ("stopped", code)


def test_a_run_that_wants_no_restarts_gets_none() -> None:
    course = answer(cycle(new_steps=3), restart=False)
    assert (course.action, course.code) == ("stopped", EXIT_FAULT)


def test_three_starts_without_a_new_step_are_enough() -> None:
    stuck = [cycle(), cycle(), cycle()]
    assert answer(*stuck[:2]).action == "restarted"
    course = answer(cycle(new_steps=5), *stuck)
    assert (course.action, course.code) == ("stopped", EXIT_STUCK)
    for word in ("step 7", "rank 1", "crash", "data of step 8"):
        assert word in course.why


def test_progress_in_between_gives_the_run_its_starts_back() -> None:
    assert answer(cycle(), cycle(), cycle(new_steps=1), cycle(), cycle()).action == "restarted"


def test_different_ranks_and_steps_are_blamed_on_the_machine() -> None:
    course = answer(cycle(step=1, suspects=(0,)), cycle(step=2, cause="hang"), cycle(step=3, suspects=(2,)))
    assert course.action == "stopped"
    assert "suspect the machine" in course.why


def test_a_start_that_never_gets_to_a_step_is_told_so() -> None:
    assert "never got to the first step" in answer(*[cycle(step=0)] * 3).why


def test_memory_that_ran_out_is_never_tried_again_as_it_was() -> None:
    course = answer(cycle(cause="oom", new_steps=9), means=Means(world_size=4, leaner="micro-batch 4 -> 2"))
    assert (course.action, course.why) == ("replanned", "micro-batch 4 -> 2")
    course = answer(cycle(cause="oom", new_steps=9))
    assert (course.action, course.code) == ("stopped", EXIT_STUCK)


def test_a_sample_that_cannot_be_loaded_is_left_out_until_there_are_too_many() -> None:
    bad = spoilt(17)
    course = answer(bad)
    assert (course.action, course.samples) == ("quarantined", (17,))
    course = answer(bad, means=Means(world_size=4, quarantined=2), max_quarantined=2)
    assert (course.action, course.code) == ("stopped", EXIT_STUCK)


def test_samples_found_one_after_the_other_are_progress() -> None:
    found = [spoilt(each, action="quarantined") for each in range(5)]
    assert answer(*found, cycle()).action == "restarted"


def test_a_rank_that_fails_twice_in_a_row_is_left_out_where_the_recipe_allows_it() -> None:
    means = Means(world_size=4, smaller=2)
    assert answer(cycle(), means=means).action == "restarted"
    course = answer(cycle(), cycle(), means=means)
    assert (course.action, course.world_size) == ("resized", 2)
    assert answer(cycle(), cycle(suspects=(2,)), means=means).action == "restarted"
