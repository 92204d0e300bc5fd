"""The order of trials and the end of a tuning, with synthetic step times: the real loop, without processes."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from trimaran import planner
from trimaran.core import Plan, Recipe
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, outline_of
from trimaran.planner import (
    ExpectedTime,
    MeasuredTrial,
    PlanAnswer,
    Question,
    StepTimeModel,
    TrialCosts,
    TrialLimits,
    TrialStore,
    TriedCandidate,
    TuneCandidate,
    Tuner,
    TuneResult,
    TuneTask,
    best_of,
    combine,
    costs_of,
    expected_gain,
    propose,
    why_not,
)

TrueSeconds = Callable[[Plan], float | str]
"""The seconds of a step, or the outcome of a plan that fails."""


def question_for(*, plan: Any = "auto") -> Question:
    tree = {"data": {"seq_len": 2048}, "train": {"global_batch": 32}, "plan": plan}
    spec = PRESETS["llama-3.2-1b"]
    return Question(recipe=Recipe.model_validate(tree), spec=spec, outline=outline_of(spec),
                    cluster=parse_cluster("4xH100"))  # fmt: skip


def search(question: Question) -> PlanAnswer:
    """Return the planner's answer, which is the same for the same pins."""
    return _searched(question.recipe.model_dump_json(exclude_unset=True))


@cache
def _searched(recipe: str) -> PlanAnswer:
    plan = json.loads(recipe).get("plan", "auto")
    return planner.search(question_for(plan=plan))


@dataclass
class Machine:
    """A machine whose plans take known times. Each trial takes 10 s, and 30 s if layers are compiled."""

    seconds: TrueSeconds
    now: float = 1000.0
    measured: list[TuneCandidate] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    interrupt_at: int = 0

    def __call__(self, candidate: TuneCandidate, limits: TrialLimits, /) -> MeasuredTrial:
        if self.interrupt_at and len(self.measured) + 1 == self.interrupt_at:
            raise KeyboardInterrupt
        self.measured.append(candidate)
        found, start = self.seconds(candidate.plan), 30.0 if candidate.plan.compile else 10.0
        self.now += start
        known: dict[str, Any] = {"key": candidate.key, "plan": candidate.plan.model_dump(mode="json"),
                                 "workers": candidate.workers, "origin": candidate.origin,
                                 "run": f"trial-{len(self.measured):03d}", "start_seconds": start,
                                 "trial_seconds": start}  # fmt: skip
        if isinstance(found, str):
            return MeasuredTrial(**known, outcome=found, reason="it is meant to")  # type: ignore[arg-type]
        figures = {"step_seconds": found, "sigma": 0.002, "steps": 10.0, "peak_bytes": 1e9}
        return MeasuredTrial(**known, outcome="measured", measured=figures)

    def starting(self, candidate: TuneCandidate, *, why: str, best: TriedCandidate | None, left: float) -> None:
        self.shown.append(why)

    def finished(self, record: MeasuredTrial, candidate: TuneCandidate) -> None:
        pass


def tune(question: Question, machine: Machine, folder: Path, *, minutes: float = 60.0) -> TuneResult:
    store = TrialStore(folder)
    store.read()
    ranked = search(question).ranked
    task = TuneTask(question=question, recipe=question.recipe, ranked=ranked, minutes=minutes)
    return Tuner(task, store, machine, machine, clock=lambda: machine.now).run()


def as_predicted(plan: Plan) -> float:
    assert plan.prediction is not None
    return 1.3 * plan.prediction.step_seconds


def test_the_first_choice_is_measured_first_and_confirmed_beside_the_best(tmp_path: Path) -> None:
    machine = Machine(lambda plan: as_predicted(plan) * (0.8 if plan.recompute == "elementwise" else 1.0))
    question = question_for()
    result = tune(question, machine, tmp_path)
    assert machine.measured[0].plan == search(question).ranked[0]
    assert machine.shown[0] == "the planner's first choice"
    assert result.best is not None
    assert result.best.candidate.plan.recompute == "elementwise"
    assert result.gain is not None
    assert result.gain > 0.1
    assert {each.num_trials for each in (result.best, result.first)} == {2}  # type: ignore[union-attr]


def test_it_stops_at_the_noise_long_before_every_candidate_was_tried_if_predictions_are_right(tmp_path: Path) -> None:
    machine = Machine(as_predicted)
    result = tune(question_for(), machine, tmp_path, minutes=600)
    assert result.stopped == "noise"
    assert "the noise is" in result.why
    assert result.proposals, "candidates are left that were not worth a trial"
    assert max(each.gain for each in result.proposals) < 0.005
    best = min(as_predicted(each.candidate.plan) for each in (*result.tried, *result.proposals))
    assert result.best is not None
    assert result.best.seconds == pytest.approx(best, rel=0.01)


def test_wrong_predictions_are_overcome(tmp_path: Path) -> None:
    """Micro-batches are twice as good as predicted for each doubling; the best has the largest that fits."""
    machine = Machine(lambda plan: as_predicted(plan) / plan.micro_batch**0.5)
    question = question_for(plan={"micro_batch": 1, "mesh": {"dp_replicate": 4}})
    pinned = tune(question, machine, tmp_path / "pinned")
    assert {each.plan.micro_batch for each in machine.measured} == {1}
    assert pinned.best is not None
    free = Machine(machine.seconds)
    result = tune(question_for(plan={"mesh": {"dp_replicate": 4}}), free, tmp_path / "free")
    assert result.best is not None
    assert result.best.seconds is not None
    assert pinned.best.seconds is not None
    assert result.best.seconds < 0.6 * pinned.best.seconds
    assert result.best.candidate.plan.micro_batch == 8


def test_time_is_kept(tmp_path: Path) -> None:
    machine = Machine(lambda plan: as_predicted(plan) * (1 + 0.3 * math.sin(crc32(str(plan).encode()) % 100)))
    began = machine.now
    result = tune(question_for(), machine, tmp_path, minutes=2)
    assert result.stopped == "time"
    assert machine.now - began <= 120 + 30
    assert result.num_new == len(machine.measured) >= 2


def test_failures_are_results_and_plans_like_them_are_left_out(tmp_path: Path) -> None:
    def seconds(plan: Plan) -> float | str:
        if plan.loss != "fused":
            return "failed"
        return as_predicted(plan) * (0.9 if plan.recompute == "none" else 1.2)

    machine = Machine(seconds)
    result = tune(question_for(), machine, tmp_path, minutes=600)
    failed = [each for each in result.tried if each.outcome == "failed"]
    assert len([each for each in failed if each.candidate.origin == "loss"]) == 2
    assert all(each.seconds is None and each.reason == "it is meant to" for each in failed)
    assert result.best is not None
    assert result.best.candidate.plan.loss == "fused"
    assert any("with another loss failed" in each.why for each in result.left_out)


def test_plans_that_need_more_than_one_that_ran_out_of_memory_are_left_out() -> None:
    question = question_for()
    plans = sorted(search(question).ranked, key=lambda plan: plan.prediction.peak_bytes if plan.prediction else 0)
    small, middle, large = plans[0], plans[len(plans) // 2], plans[-1]
    tried = [TriedCandidate(candidate=TuneCandidate(plan=middle), outcome="out of memory")]
    assert why_not(TuneCandidate(plan=small), tried) == ""
    assert "ran out of it" in why_not(TuneCandidate(plan=large), tried)
    unfit = small.model_copy(update={"prediction": small.prediction.model_copy(update={"fits": False})})  # type: ignore[union-attr]
    assert "should not fit" in why_not(TuneCandidate(plan=unfit), [])


def test_if_the_first_choice_fails_its_neighbours_are_tried(tmp_path: Path) -> None:
    question = question_for()
    first = search(question).ranked[0]
    machine = Machine(lambda plan: "out of memory" if plan == first else as_predicted(plan))
    result = tune(question, machine, tmp_path, minutes=600)
    assert result.first is not None
    assert result.first.outcome == "out of memory"
    assert result.best is not None
    assert result.gain is None


def test_ctrl_c_keeps_results_and_the_next_tuning_continues(tmp_path: Path) -> None:
    machine = Machine(lambda plan: as_predicted(plan) * (0.8 if plan.recompute == "elementwise" else 1.0),
                      interrupt_at=4)  # fmt: skip
    result = tune(question_for(), machine, tmp_path)
    assert result.stopped == "interrupted"
    assert len(result.tried) == len({each.key for each in machine.measured}) == 3
    again = Machine(machine.seconds)
    continued = tune(question_for(), again, tmp_path)
    compared = {each.candidate.key for each in continued.tried if each.num_trials > 1}
    repeated = {each.key for each in again.measured} & {each.key for each in machine.measured}
    assert repeated <= compared, "only the last comparison measures a plan again"
    assert len(continued.tried) > 3
    done = tune(question_for(), third := Machine(machine.seconds), tmp_path)
    assert third.measured == []
    assert done.num_new == 0
    assert done.best is not None
    assert continued.best is not None
    assert done.best.candidate.key == continued.best.candidate.key


def test_results_of_other_pins_count_only_if_they_keep_these(tmp_path: Path) -> None:
    tune(question_for(), Machine(as_predicted), tmp_path, minutes=2)
    result = tune(question_for(plan={"recompute": "full"}), machine := Machine(as_predicted), tmp_path, minutes=2)
    assert {each.candidate.plan.recompute for each in result.tried} == {"full"}
    assert {each.plan.recompute for each in machine.measured} == {"full"}


def some_record() -> MeasuredTrial:
    return Machine(lambda plan: 0.5)(TuneCandidate(plan=Plan()), TrialLimits())


def test_forgotten_results_do_not_count_any_more(tmp_path: Path) -> None:
    store = TrialStore(tmp_path)
    store.add(some_record())
    store.forget()
    store.add(after := replace(some_record(), run="trial-002"))
    again = TrialStore(tmp_path)
    again.read()
    assert again.records == store.records == [after]


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    store = TrialStore(tmp_path)
    store.add(some_record())
    line = store.path.read_text().strip()
    store.path.write_text("\n".join(['{"key": 3}', "{", line, line.replace("mesh", "mash"), ""]))
    again = TrialStore(tmp_path)
    again.read()
    assert again.records == store.records


def test_the_expected_gain_grows_with_the_promise_and_with_the_uncertainty() -> None:
    assert expected_gain(1.0, ExpectedTime(0.8, 0.01)) == pytest.approx(-math.log(0.8), rel=0.01)
    assert expected_gain(1.0, ExpectedTime(1.5, 0.01)) == pytest.approx(0.0, abs=1e-9)
    assert expected_gain(1.0, ExpectedTime(1.0, 0.1)) == pytest.approx(0.1 / math.sqrt(2 * math.pi), rel=1e-6)
    gains = [expected_gain(1.0, ExpectedTime(1.1, sigma)) for sigma in (0.02, 0.05, 0.1, 0.3)]
    assert gains == sorted(gains)


def test_a_measured_plan_corrects_its_neighbours_more_than_others() -> None:
    question = question_for()
    ranked = search(question).ranked
    near = ranked[0].model_copy(update={"comm": ranked[0].comm.model_copy(update={"prefetch": 2})})
    far = next(plan for plan in ranked if plan.mesh.tp > 1)
    first = TuneCandidate(plan=ranked[0])
    assert first.predicted_seconds is not None
    unknown = StepTimeModel([])
    tried = TriedCandidate(candidate=first, outcome="measured", seconds=1.1 * first.predicted_seconds, sigma=0.005)
    model = StepTimeModel([tried])
    own = model.expect(first)
    assert own.seconds == pytest.approx(tried.seconds, rel=0.01)
    sigmas = [own.sigma, model.expect(TuneCandidate(plan=near)).sigma, model.expect(TuneCandidate(plan=far)).sigma]
    assert sigmas == sorted(sigmas)
    assert sigmas[-1] < unknown.expect(TuneCandidate(plan=far)).sigma
    assert far.prediction is not None
    assert (
        far.prediction.step_seconds < model.expect(TuneCandidate(plan=far)).seconds < 1.1 * far.prediction.step_seconds
    )


def test_contradictions_become_noise_and_not_absurd_expectations() -> None:
    question = question_for()
    base = search(question).ranked[0]
    tried = []
    for number, factor in enumerate((1.0, 1.9, 1.0, 1.8, 1.1)):
        plan = base.model_copy(update={"comm": base.comm.model_copy(update={"prefetch": 1 + number})})
        candidate = TuneCandidate(plan=plan)
        seconds = factor * (candidate.predicted_seconds or 0.0)
        tried.append(TriedCandidate(candidate=candidate, outcome="measured", seconds=seconds, sigma=0.01))
    model = StepTimeModel(tried)
    assert model.noise >= 0.08
    for plan in search(question).ranked:
        assert plan.prediction is not None
        assert 0.99 <= model.expect(TuneCandidate(plan=plan)).seconds / plan.prediction.step_seconds <= 1.91


def test_trials_that_cost_more_wait() -> None:
    question = question_for()
    first, second, *_ = search(question).ranked
    tried = {"first": TriedCandidate(candidate=TuneCandidate(plan=first), outcome="measured", seconds=1.0, sigma=0.01)}
    costs = costs_of([(False, 5.0), (True, 80.0), (False, 7.0)], [10, 20, 30])
    assert costs == TrialCosts(plain_seconds=6.0, compiled_seconds=80.0, num_steps=20)
    plain = second.model_copy(update={"compile": False})
    compiled = second.model_copy(update={"compile": True})
    candidates = {each.key: each for each in (TuneCandidate(plan=compiled), TuneCandidate(plan=plain))}
    ordered = propose(candidates, tried, costs).ordered
    assert [each.candidate.plan.compile for each in ordered] == [False, True]


def test_repeated_trials_are_averaged_and_unfinished_ones_do_not_count() -> None:
    candidate = TuneCandidate(plan=Plan())
    known: dict[str, Any] = {"key": candidate.key, "plan": candidate.plan.model_dump(mode="json"), "workers": "auto",
                             "origin": "planner", "run": "trial-001"}  # fmt: skip
    records = [
        MeasuredTrial(**known, outcome="unfinished"),
        MeasuredTrial(**known, outcome="measured", measured={"step_seconds": 1.0, "sigma": 0.01, "steps": 5.0}),
        MeasuredTrial(**known, outcome="measured", measured={"step_seconds": 1.21, "sigma": 0.01, "steps": 7.0}),
    ]
    assert combine(records[:1], {candidate.key: candidate}) == {}
    (tried,) = combine(records, {candidate.key: candidate}).values()
    assert tried.seconds == pytest.approx(1.1)
    assert tried.num_steps == 12
    assert tried.sigma > 0.05, "trials that differ by a fifth are not known to a hundredth"
    assert best_of([tried]) is tried
