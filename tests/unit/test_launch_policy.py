"""The policy after a failed attempt, by cause and by progress."""

from typing import Any

import pytest

from trimaran.core import EXIT_AGAIN, EXIT_STUCK, EXIT_USER, FaultsSection, Incident
from trimaran.launch import EXIT_FAULT, Cycle, PolicyDecision, RecoveryOptions, decide

OPTIONS = RecoveryOptions(world_size=4)


def cycle(*, cause: Any = "crash", new_steps: int = 0, action: Any = None, **known: Any) -> Cycle:
    fields: dict[str, Any] = {"step": 7, "suspects": (1,)} | known
    incident = Incident(id="i-0001", cause=cause, time=0.0, what="it failed", action=action, **fields)
    return Cycle(incident=incident, new_steps=new_steps)


def bad_samples(*samples: int, action: Any = None) -> Cycle:
    return cycle(cause="data", evidence={"sample_ids": list(samples)}, action=action)


def decide_after(*cycles: Cycle, options: RecoveryOptions = OPTIONS, **faults: Any) -> PolicyDecision:
    return decide(cycles, FaultsSection(**faults), options)


@pytest.mark.parametrize("cause", ["crash", "exit", "hang", "mismatch", "network", "host", "storage", "unknown"])
def test_most_faults_lead_to_a_restart(cause: str) -> None:
    assert decide_after(cycle(cause=cause, new_steps=3)).action == "restarted"


@pytest.mark.parametrize(("cause", "code"), [("user", EXIT_USER), ("preempted", EXIT_AGAIN), ("numeric", EXIT_STUCK)])
def test_some_causes_stop_the_run(cause: str, code: int) -> None:
    decision = decide_after(cycle(cause=cause, new_steps=3))
    assert (decision.action, decision.code) == ("stopped", code)


@pytest.mark.parametrize("restart", [True, False])
def test_a_last_checkpoint_that_the_disk_cannot_take_ends_the_run_as_one_to_start_again(restart: bool) -> None:
    unwritten = cycle(cause="storage", new_steps=3, suspects=(), evidence={"code": "K043"})
    decision = decide_after(unwritten, restart=restart)
    assert (decision.action, decision.code) == ("stopped", EXIT_AGAIN)


def test_a_recipe_without_restarts_stops_the_run() -> None:
    decision = decide_after(cycle(new_steps=3), restart=False)
    assert (decision.action, decision.code) == ("stopped", EXIT_FAULT)


def test_three_starts_without_a_new_step_stop_the_run() -> None:
    stuck = [cycle(), cycle(), cycle()]
    assert decide_after(*stuck[:2]).action == "restarted"
    decision = decide_after(cycle(new_steps=5), *stuck)
    assert (decision.action, decision.code) == ("stopped", EXIT_STUCK)
    for text in ("step 7", "rank 1", "crash", "data of step 8"):
        assert text in decision.why


def test_a_fault_after_the_last_step_does_not_name_a_step_that_does_not_exist() -> None:
    decision = decide_after(*3 * [cycle(step=8)], options=RecoveryOptions(world_size=4, last_step=8))
    assert decision.action == "stopped"
    assert "after step 8, the last one" in decision.why
    assert "step 9" not in decision.why


def test_progress_resets_the_count_of_starts() -> None:
    assert decide_after(cycle(), cycle(), cycle(new_steps=1), cycle(), cycle()).action == "restarted"


def test_different_ranks_and_steps_point_to_the_machine() -> None:
    decision = decide_after(cycle(step=1, suspects=(0,)), cycle(step=2, cause="hang"), cycle(step=3, suspects=(2,)))
    assert decision.action == "stopped"
    assert "suspect the machine" in decision.why


def test_a_run_that_never_reaches_the_first_step_is_described_so() -> None:
    assert "never reached the first step" in decide_after(*[cycle(step=0)] * 3).why


def test_the_same_plan_is_never_restarted_after_an_oom() -> None:
    decision = decide_after(
        cycle(cause="oom", new_steps=9), options=RecoveryOptions(world_size=4, less_memory="micro-batch 4 -> 2")
    )
    assert (decision.action, decision.why) == ("replanned", "micro-batch 4 -> 2")
    decision = decide_after(cycle(cause="oom", new_steps=9))
    assert (decision.action, decision.code) == ("stopped", EXIT_STUCK)


def test_a_bad_sample_is_quarantined_up_to_the_limit() -> None:
    bad = bad_samples(17)
    decision = decide_after(bad)
    assert (decision.action, decision.samples) == ("quarantined", (17,))
    decision = decide_after(bad, options=RecoveryOptions(world_size=4, quarantined=2), max_quarantined=2)
    assert (decision.action, decision.code) == ("stopped", EXIT_STUCK)


def test_quarantined_samples_count_as_progress() -> None:
    found = [bad_samples(each, action="quarantined") for each in range(5)]
    assert decide_after(*found, cycle()).action == "restarted"


def test_a_rank_that_fails_twice_in_a_row_is_left_out_if_the_recipe_allows_it() -> None:
    options = RecoveryOptions(world_size=4, smaller=2)
    assert decide_after(cycle(), options=options).action == "restarted"
    decision = decide_after(cycle(), cycle(), options=options)
    assert (decision.action, decision.world_size) == ("resized", 2)
    assert decide_after(cycle(), cycle(suspects=(2,)), options=options).action == "restarted"
