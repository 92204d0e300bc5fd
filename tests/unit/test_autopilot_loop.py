"""The decision loop: a decision, its trial, its verdict; a person's change; a controller that starts again."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from trimaran.autopilot import (
    ChangeAnswer,
    DecisionLoop,
    Output,
    PendingRequest,
    Proposal,
    RunSettings,
    TimedStep,
    settings_of,
    undo_of,
)
from trimaran.core import AutopilotSection, Decision, Plan, Recipe

FAST = {"plan.micro_batch": 2, "plan.grad_accum": 4}
SLOW = {"plan.comm.bucket_mb": 1}
NEVER = {"plan.compile": True}


class ToyRun:
    """A run in memory: a decision loop, the settings that its requests change, and step times that follow from them."""

    def __init__(self, *patches: dict[str, Any], section: AutopilotSection | None = None, steps: int = 4000) -> None:
        self.loop = DecisionLoop(section or AutopilotSection(mode="act"))
        self.plan = settings_of(Plan(micro_batch=1, grad_accum=8), Recipe())
        self.patches, self.steps, self.step, self.in_place = patches, steps, 0, True
        self.written: list[Decision] = []
        self.samples: list[TimedStep] = []
        self.requests: list[PendingRequest] = []
        self.status: Callable[[PendingRequest], Any] = lambda request: "applied"
        self.rng, self.speed, self.peak = random.Random(0), 1.0, 1.0

    def propose(self) -> Sequence[Proposal]:
        return [
            Proposal(patch=each, undo=undo_of(each, self.plan) or {}, gain=0.15, uncertainty=0.05, reason="a try")
            for each in self.patches
        ]

    def seconds(self) -> float:
        factor = 0.8 if self.plan["plan.micro_batch"] == 2 else 1.0
        factor *= 1.4 if self.plan["plan.comm.bucket_mb"] == 1 else 1.0
        return factor * self.speed * self.rng.gauss(1, 0.01)

    def train(self, count: int = 1, *, answer: bool = True) -> None:
        """Train steps; after each, poll the loop, and answer its request unless told not to."""
        for _ in range(count):
            self.step += 1
            took = self.seconds()
            self.samples.append(TimedStep(self.step, took, took, self.peak))
            self.loop.add_step(self.samples[-1])
            settings = RunSettings(total_steps=self.steps, settings=self.plan)
            self.take(self.loop.poll(settings, now=float(self.step), propose=self.propose), answer=answer)

    def take(self, output: Output, *, answer: bool = True) -> None:
        self.written += output.decisions
        if output.request is not None:
            self.requests.append(output.request)
            if answer:
                self.answer(output.request)

    def answer(self, request: PendingRequest, *, by: Any = "autopilot") -> ChangeAnswer:
        status = self.status(request)
        if status == "applied":
            self.plan |= request.patch
        found = ChangeAnswer(id=request.id, step=self.step, status=status, patch=request.patch, by=by,
                             in_place=self.in_place, pause_seconds=0.01, error="why")  # fmt: skip
        self.loop.add_answer(found)
        self.take(self.loop.take_output())
        return found

    def train_until(self, outcome: str, most: int = 600) -> Decision:
        """Train until a decision has this outcome, and return it."""
        for _ in range(most):
            if found := [each for each in self.loop.decisions.values() if each.outcome == outcome]:
                return found[-1]
            self.train()
        raise AssertionError(f"no decision was {outcome}: {self.loop.decisions}")


class CompilingRun(ToyRun):
    """A run whose first step after a change compiles for 40 s. The ranks say so, and it is left out."""

    extra = 0.0

    def answer(self, request: PendingRequest, *, by: Any = "autopilot") -> ChangeAnswer:
        self.in_place = False
        found = super().answer(request, by=by)
        self.loop.marks.leave_out_after(self.step)
        self.extra = 40.0
        return found

    def seconds(self) -> float:
        seconds, self.extra = super().seconds() + self.extra, 0.0
        return seconds


def test_first_steps_that_are_not_compared_are_a_cost_of_the_trial() -> None:
    kept = CompilingRun(FAST).train_until("kept")
    assert kept.measured is not None
    assert kept.measured["gain"] == pytest.approx(0.2, abs=0.02)
    assert kept.measured["pause_seconds"] > 39
    short = CompilingRun(FAST, steps=1200)  # half of what is left of its budget is less than that
    assert short.train_until("rolled-back").measured is not None


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "rebuilt"])
def test_a_change_that_helps_is_kept_with_what_was_measured(in_place: bool) -> None:
    run = ToyRun(FAST)
    run.in_place = in_place
    kept = run.train_until("kept")
    assert run.plan["plan.micro_batch"] == 2
    assert kept.measured is not None
    assert kept.measured["gain"] == pytest.approx(0.2, abs=0.02)
    assert kept.measured["confidence"] > 0.98
    assert kept.undo == {"plan.micro_batch": 1, "plan.grad_accum": 8}
    assert kept.expected["step_seconds"] == pytest.approx(0.85 * kept.baseline["step_seconds"], rel=1e-3)
    assert [each.outcome for each in run.written if each.id == 1][-1] == "kept"
    assert len(run.requests) == (3 if in_place else 1)  # in place: with it, without it, with it again
    assert run.loop.spent_seconds < 0.03 * run.steps


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "rebuilt"])
def test_a_change_that_hurts_is_rolled_back_within_its_window_and_not_tried_again(in_place: bool) -> None:
    run = ToyRun(SLOW)
    run.in_place = in_place
    rolled_back = run.train_until("rolled-back")
    assert run.step - rolled_back.step < 25
    assert run.plan["plan.comm.bucket_mb"] == 25
    assert rolled_back.measured is not None
    assert rolled_back.measured["gain"] < -0.3
    run.train(500)
    assert len(run.loop.decisions) == 1


@pytest.mark.parametrize("status", ["refused", "failed"])
def test_a_refused_or_failed_change_ends_the_trial_and_is_never_tried_again(status: str) -> None:
    run = ToyRun(NEVER)
    run.status = lambda request: status
    found = run.train_until(status)
    assert found.reason == f"a try; {status}: why"
    run.train(400)
    assert len(run.requests) == 1


def test_one_change_is_tried_at_a_time_and_all_that_help_are_kept() -> None:
    run = ToyRun(SLOW, NEVER, FAST)
    run.status = lambda request: "refused" if request.patch == NEVER else "applied"
    run.train(500)
    outcomes = {str(each.patch): each.outcome for each in run.loop.decisions.values()}
    assert outcomes == {str(SLOW): "rolled-back", str(NEVER): "refused", str(FAST): "kept"}
    assert len({each.id for each in run.requests}) == len(run.requests)


def test_the_budget_ends_a_trial_and_forbids_the_next() -> None:
    run = ToyRun(SLOW, FAST, section=AutopilotSection(mode="act", budget=0.001), steps=1000)
    run.train(600)
    assert run.loop.decisions == {}  # the worst case of any trial is more than a second


def test_a_persons_change_ends_the_trial_without_a_rollback_and_pins_its_fields() -> None:
    run = ToyRun(FAST, SLOW)
    while not run.requests:
        run.train()
    tried = run.requests[0].patch
    run.train(2)
    mine = PendingRequest(id=run.loop.last_request + 1, patch={"plan.recompute": "full"}, reason="mine")
    run.answer(mine, by="user")
    first = run.loop.decisions[1]
    assert (first.outcome, first.measured) == ("kept", None)
    assert "a person changed the run" in first.reason
    assert {**run.plan, **tried} == run.plan
    assert run.loop.trial is None
    assert "plan.recompute" in run.loop.pins


def test_a_person_takes_a_kept_decision_back_for_good() -> None:
    run = ToyRun(FAST)
    kept = run.train_until("kept")
    run.answer(PendingRequest(id=99, patch=kept.undo, reason="undo 1"), by="user")
    assert run.loop.decisions[1].outcome == "undone"
    assert run.loop.decisions[1].by == "user"
    run.train(400)
    assert len(run.loop.decisions) == 1
    assert run.loop.last_request == 99


def test_pinned_fields_and_modes_are_respected() -> None:
    for section in (AutopilotSection(mode="off"), AutopilotSection(mode="act", keep=("micro_batch",))):
        run = ToyRun(FAST, section=section)
        run.train(300)
        assert run.loop.decisions == {}


def test_advice_is_written_once_and_nothing_is_requested() -> None:
    run = ToyRun(FAST, SLOW, section=AutopilotSection(mode="advise"))
    run.train(800)
    assert run.requests == []
    assert [each.outcome for each in run.written] == ["advised", "advised"]
    assert {str(each.patch) for each in run.written} == {str(FAST), str(SLOW)}


def restarted(run: ToyRun, answers: list[ChangeAnswer], *, pending: PendingRequest | None) -> ToyRun:
    """Return the run with a new loop that has read the ledger, the steps and the answers."""
    latest = {each.id: each for each in run.written}
    loop = DecisionLoop(run.loop.section, latest.values())
    for each in run.samples:
        loop.add_step(each)
    for answer in answers:
        loop.add_answer(answer)
    run.loop = loop
    loop.resume_trial(pending)
    run.take(loop.take_output())
    return run


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "rebuilt"])
def test_a_controller_that_starts_again_finishes_the_trial(in_place: bool) -> None:
    run = ToyRun(FAST)
    run.in_place = in_place
    while not run.requests:
        run.train(answer=False)
    answers = [run.answer(run.requests[0])]
    run.train(4)
    again = restarted(run, answers, pending=None)
    assert again.loop.trial is not None
    kept = again.train_until("kept")
    assert kept.id == 1
    assert kept.measured is not None
    assert kept.measured["gain"] == pytest.approx(0.2, abs=0.03)


def test_a_controller_that_starts_again_waits_for_the_answer_to_its_request() -> None:
    run = ToyRun(FAST)
    while not run.requests:
        run.train(answer=False)
    again = restarted(run, [], pending=replace(run.requests[0], outcome=None))
    again.train(10)
    assert len(again.requests) == 1  # not asked a second time
    again.answer(again.requests[0])
    assert again.train_until("kept").id == 1


def test_a_controller_that_starts_again_without_answer_and_request_gives_the_trial_up() -> None:
    run = ToyRun(FAST)
    while not run.requests:
        run.train(answer=False)
    again = restarted(run, [], pending=None)
    assert again.loop.decisions[1].outcome == "rolled-back"
    assert again.loop.decisions[1].measured is None
    assert again.train_until("kept").id == 2  # it may be tried again


def test_a_controller_that_starts_again_after_a_rollback_does_not_apply_the_change_again() -> None:
    run = ToyRun(SLOW)
    answers: list[ChangeAnswer] = []
    while len(run.requests) < 2:
        run.train(answer=False)
        if len(run.requests) == 1 and not answers:
            answers.append(run.answer(run.requests[0]))
    request = run.requests[1]
    assert request.patch == {"plan.comm.bucket_mb": 25}
    run.plan |= request.patch
    answers.append(replace(answers[0], id=request.id, step=run.step, patch=request.patch))
    again = restarted(run, answers, pending=None)
    assert again.loop.decisions[1].outcome == "rolled-back"
    again.train(100)
    assert len(again.requests) == 2


def test_ranks_that_start_again_during_a_trial_get_the_old_plan_back() -> None:
    run = ToyRun(FAST)
    while not run.requests:
        run.train()
    run.loop.restarted(run.step)
    run.take(run.loop.take_output())
    assert run.loop.decisions[1].outcome == "failed"
    assert run.plan["plan.micro_batch"] == 1
    run.train(300)
    assert len(run.loop.decisions) == 1


def test_switching_off_takes_a_trial_back() -> None:
    run = ToyRun(FAST)
    while not run.requests:
        run.train()
    run.loop.take_back_trial("switched off")
    run.take(run.loop.take_output())
    assert run.loop.decisions[1].outcome == "rolled-back"
    assert run.plan["plan.micro_batch"] == 1


def test_a_step_that_is_trained_again_replaces_the_later_ones() -> None:
    run = ToyRun(FAST, section=AutopilotSection(mode="advise"))
    for step in range(1, 101):
        for again, seconds in ((step, 9.0), (step + 1, 9.0), (step, 1.0)):
            run.loop.add_step(TimedStep(again, seconds, seconds))
        assert run.loop.step == step
    output = run.loop.poll(RunSettings(total_steps=4000, settings=run.plan), now=0.0, propose=run.propose)
    (decision,) = output.decisions
    assert decision.baseline["step_seconds"] == 1.0
    assert decision.baseline["spread"] < 0.01
