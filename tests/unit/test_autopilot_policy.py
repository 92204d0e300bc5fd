"""The policy: which change is tried next, and which never."""

from dataclasses import replace
from typing import Any

import pytest

from trimaran.autopilot import (
    Baseline,
    MemoryTrend,
    Proposal,
    Situation,
    advise,
    decide,
    is_pinned,
    settings_of,
    undo_of,
    why_not,
)
from trimaran.core import Decision, Plan, Recipe, UserError, dump_recipe, parse_recipe

SETTINGS = settings_of(Plan(micro_batch=2, grad_accum=8, recompute="full"), Recipe())


def proposal(patch: dict[str, Any], gain: float = 0.1, **other: Any) -> Proposal:
    undo = undo_of(patch, SETTINGS)
    assert undo is not None
    return Proposal(patch=patch, undo=undo, gain=gain, uncertainty=0.03, reason="it should help", **other)


MICRO = proposal({"plan.micro_batch": 4, "plan.grad_accum": 4}, is_in_place=True)
RECOMPUTE = proposal({"plan.recompute": "none"}, 0.2)
COMPILE = proposal({"plan.compile": True}, 0.05)


def situation(*proposals: Proposal, **other: Any) -> Situation:
    known: dict[str, Any] = {"step": 100, "steps_left": 5000, "settings": SETTINGS, "budget_seconds": 150.0}
    known |= {"baseline": Baseline(step_seconds=1.0, spread=0.02, steps=100), "proposals": proposals}
    return Situation(**known | other)


def decision(patch: dict[str, Any], outcome: str, *, number: int = 1, seconds: float = 1.0, **other: Any) -> Decision:
    measured = {"step_seconds": seconds, "gain": 1 - seconds, "confidence": 0.5, "steps": 20, "pause_seconds": 1.0}
    known: dict[str, Any] = {"time": 0.0, "step": 50, "finding": "", "reason": "", "undo": undo_of(patch, SETTINGS)}
    known |= {"baseline": {"step_seconds": 1.0}, "measured": measured, "outcome": outcome}
    return Decision(id=number, patch=patch, **known | other)


def test_the_change_that_should_save_most_is_tried_first() -> None:
    assert decide(situation(MICRO, RECOMPUTE, COMPILE)) == RECOMPUTE


def test_a_change_that_is_cheap_to_try_comes_before_a_slightly_better_one_that_is_not() -> None:
    rebuilt = proposal({"plan.offload": "optimizer"}, 0.105)
    assert decide(situation(MICRO, rebuilt, steps_left=300, pause_seconds={True: 0.1, False: 4.0})) == MICRO


def test_a_change_that_compiles_is_tried_only_if_the_run_is_long_enough() -> None:
    compiled = replace(COMPILE, first_step_seconds=60.0)
    assert decide(situation(COMPILE, steps_left=600)) == COMPILE
    assert decide(situation(compiled, steps_left=600)) is None
    assert decide(situation(compiled, steps_left=20_000)) == compiled
    assert decide(situation(compiled, steps_left=20_000, budget_seconds=50.0)) is None


@pytest.mark.parametrize(
    ("proposed", "other"),
    [
        (replace(MICRO, gain=-0.2), {}),
        (replace(MICRO, gain=0.002, uncertainty=0.001), {}),
        (MICRO, {"steps_left": 20}),
        (MICRO, {"budget_seconds": 0.0}),
        (MICRO, {"baseline": Baseline(step_seconds=1.0, spread=2.0, steps=100)}),
    ],
    ids=["hurts", "too small", "too late", "no budget", "below the noise"],
)
def test_nothing_is_tried_that_does_not_pay(proposed: Proposal, other: dict[str, Any]) -> None:
    assert decide(situation(MICRO)) == MICRO
    assert decide(situation(proposed, **other)) is None


def test_the_budget_counts_what_the_ledger_says_was_spent() -> None:
    slow = decision({"plan.compile": True}, "rolled-back", seconds=8.0)
    assert slow.trial_seconds == pytest.approx(1 + 20 * 7)
    assert replace(slow, outcome="kept").trial_seconds == 1.0
    assert replace(slow, measured=None).trial_seconds == 0.0
    assert decide(situation(MICRO, decisions=[slow])) == MICRO
    assert decide(situation(MICRO, decisions=[slow, replace(slow, id=2)])) is None


@pytest.mark.parametrize("pin", ["micro_batch", "plan.micro_batch", "grad_accum"])
def test_a_pinned_field_stays(pin: str) -> None:
    assert decide(situation(MICRO, pins=[pin])) is None
    assert decide(situation(MICRO, RECOMPUTE, pins=[pin])) == RECOMPUTE


def test_a_pin_covers_the_fields_below_it() -> None:
    assert is_pinned("plan.mesh.tp", ["mesh"])
    assert is_pinned("plan.comm.bucket_mb", ["comm.bucket_mb"])
    assert not is_pinned("plan.comm.bucket_mb", ["comm.prefetch"])
    assert is_pinned("checkpoint.every", ["checkpoint"])


def test_the_course_changes_only_if_the_recipe_allows_it() -> None:
    precision = proposal({"plan.precision": "bf16"}, 0.4)
    assert decide(situation(precision)) is None
    assert decide(situation(precision, may_change_course=True)) == precision


def test_what_a_running_run_cannot_change_is_not_tried() -> None:
    wrong = replace(MICRO, patch={"train.lr": 0.1}, undo={"train.lr": 0.2})
    assert why_not(wrong, situation()) == "a running run cannot change this"
    assert why_not(replace(MICRO, patch={"plan.micro_batch": 2}), situation()) == "nothing would change"


def test_a_change_must_fit_by_the_measured_peak() -> None:
    memory = MemoryTrend(peak=50.0, growth=0.0, limit=100.0)
    assert decide(situation(replace(MICRO, peak_ratio=1.8), memory=memory)) is not None
    assert decide(situation(replace(MICRO, peak_ratio=1.9), memory=memory)) is None


@pytest.mark.parametrize("outcome", ["failed", "refused", "rolled-back", "undone", "advised"])
def test_the_same_change_is_not_tried_twice(outcome: str) -> None:
    assert decide(situation(MICRO, decisions=[decision(MICRO.patch, outcome)])) is None


def test_a_failure_forbids_what_contains_it_and_what_goes_further() -> None:
    failed = decision({"plan.micro_batch": 4, "plan.grad_accum": 4}, "failed")
    further = proposal({"plan.micro_batch": 8, "plan.grad_accum": 2}, 0.3)
    both = proposal({"plan.micro_batch": 4, "plan.grad_accum": 4, "plan.recompute": "none"}, 0.3)
    assert decide(situation(further, decisions=[failed])) is None
    assert decide(situation(both, decisions=[failed])) is None
    assert decide(situation(RECOMPUTE, decisions=[failed])) == RECOMPUTE


def test_what_did_not_help_may_be_tried_once_more_under_another_plan() -> None:
    again = [decision(MICRO.patch, "rolled-back"), decision({"plan.compile": True}, "kept", number=2)]
    assert decide(situation(MICRO, decisions=again)) == MICRO
    assert decide(situation(MICRO, decisions=[*again, decision(MICRO.patch, "rolled-back", number=3)])) is None


def test_a_change_that_was_blamed_for_a_slower_machine_is_tried_again() -> None:
    blamed = decision(MICRO.patch, "rolled-back", seconds=1.1)
    slower = Baseline(step_seconds=1.3, spread=0.02, steps=100)
    assert decide(situation(MICRO, decisions=[blamed])) is None
    assert decide(situation(MICRO, decisions=[blamed], baseline=slower)) == MICRO


def test_a_kept_change_is_taken_back_only_if_steps_became_longer_and_only_once() -> None:
    kept = decision({"plan.recompute": "full"}, "kept", seconds=0.8, undo={"plan.recompute": "none"})
    slower = Baseline(step_seconds=1.3, spread=0.02, steps=100)
    assert (
        decide(situation(RECOMPUTE, decisions=[kept], baseline=Baseline(step_seconds=0.8, spread=0.02, steps=9)))
        is None
    )
    assert decide(situation(RECOMPUTE, decisions=[kept], baseline=slower)) == RECOMPUTE
    back = decision({"plan.recompute": "none"}, "kept", number=2, seconds=0.8, undo={"plan.recompute": "full"})
    forth = decision({"plan.recompute": "full"}, "kept", number=3, seconds=0.8, undo={"plan.recompute": "none"})
    assert decide(situation(RECOMPUTE, decisions=[kept, back, forth], baseline=slower)) is None


def test_where_the_cost_model_was_wrong_other_values_of_the_field_are_worth_a_trial() -> None:
    smaller = proposal({"plan.micro_batch": 8, "plan.grad_accum": 2}, -0.1, is_in_place=True)
    expected, patch = {"gain": 0.4, "uncertainty": 0.2}, {"plan.micro_batch": 16, "plan.grad_accum": 1}
    settings = SETTINGS | patch
    as_predicted = decision(patch, "kept", seconds=0.6, expected=expected)
    assert decide(situation(smaller, settings=settings, steps_left=400, decisions=[as_predicted])) is None
    worse = decision(patch, "kept", seconds=0.85, expected=expected)
    tried = decide(situation(smaller, settings=settings, steps_left=400, decisions=[worse]))
    assert tried is not None
    assert (tried.patch, tried.uncertainty) == (smaller.patch, pytest.approx(0.25))
    of_another_field = decision({"plan.recompute": "none"}, "kept", seconds=0.85, expected=expected)
    assert decide(situation(smaller, settings=settings, steps_left=400, decisions=[of_another_field])) is None


def test_memory_that_is_about_to_run_out_comes_first_whatever_it_costs() -> None:
    saving = proposal({"plan.micro_batch": 1, "plan.grad_accum": 16}, -0.1, saves_memory=True, peak_ratio=0.6)
    costly = proposal({"plan.offload": "optimizer"}, -0.4, saves_memory=True, peak_ratio=0.5)
    growing = MemoryTrend(peak=96.0, growth=0.01, limit=100.0)
    assert decide(situation(RECOMPUTE, costly, saving, memory=growing)) == saving
    assert decide(situation(RECOMPUTE, saving, memory=growing, budget_seconds=0.0)) == saving
    steady = MemoryTrend(peak=96.0, growth=0.0, limit=100.0)
    assert decide(situation(RECOMPUTE, saving, memory=steady)) == RECOMPUTE
    assert MemoryTrend(peak=90.0, growth=0.1, limit=100.0).is_running_out
    assert not MemoryTrend(peak=60.0, growth=0.1, limit=100.0).is_running_out


def test_advice_is_given_once_and_only_if_it_is_worth_it() -> None:
    assert advise(situation(MICRO, COMPILE)) == MICRO
    told = decision(MICRO.patch, "advised")
    other = proposal({"plan.micro_batch": 8, "plan.grad_accum": 2}, 0.12)
    assert advise(situation(MICRO, other, decisions=[told])) is None
    assert advise(situation(RECOMPUTE, decisions=[told])) == RECOMPUTE
    assert advise(situation(replace(COMPILE, gain=0.03))) is None


@pytest.mark.parametrize(
    ("text", "mode"),
    [("", "advise"), ("autopilot: act", "act"), ("autopilot: off", "off"), ("autopilot: {mode: off}", "off")],
)
def test_a_recipe_names_the_mode_alone_or_in_a_section(text: str, mode: str) -> None:
    recipe = parse_recipe(text, name="-")
    assert recipe.autopilot.mode == mode
    assert parse_recipe(dump_recipe(recipe), name="-") == recipe


def test_settings_reach_the_section_also_if_the_recipe_has_only_the_mode() -> None:
    section = parse_recipe("autopilot: act", name="-", overrides=["autopilot.keep=[mesh, comm.bucket_mb]"]).autopilot
    assert (section.mode, section.keep, section.budget) == ("act", ("mesh", "comm.bucket_mb"), 0.03)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("autopilot: fly", "'advise'"),
        ("autopilot: {keep: [mash]}", "did you mean 'mesh'"),
        ("autopilot: {budget: 2}", "less than or equal to 0.5"),
        ("autopilot: {pins: []}", "no field 'pins'"),
    ],
)
def test_mistakes_in_the_section_are_clear_errors(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_recipe(text, name="r.yaml")
    assert says in str(caught.value)
