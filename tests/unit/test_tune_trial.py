"""One trial: its recipe, when it ends, what it reports; and the recipe that a tuning writes."""

import math
from pathlib import Path
from typing import Any

import pytest

from trimaran.app import (
    HEADER,
    MAX_STEADY_STEPS,
    TrialWatch,
    describe,
    refuse_other_file,
    trial_recipe,
    tuned_recipe_text,
    write_tuned_recipe,
)
from trimaran.core import Plan, Recipe, UserError, parse_recipe
from trimaran.planner import TrialLimits, TuneCandidate, locked_folder
from trimaran.runs import RunDirectory, StepLine

COLD = [9.0, 2.0, 1.0, 1.0, 2.0]  # the first steps
PLAN = {"mesh": {"dp_replicate": 2}, "micro_batch": 4, "precision": "fp32"}


def _step(number: int, seconds: float) -> StepLine:
    phases = {"data": 0.0, "checkpoint": 0.0}
    return StepLine(number, 1.0, 1.0, 1e-3, 100, 4, seconds, 0.0, 1 << 20, phases, 1000.0 + number, b"")


def watch(seconds: list[float], *, at: float = 10.0, **limits: Any) -> str | None:
    """Return the outcome of a trial with these steps, `at` seconds after its start; None if it goes on."""
    found = TrialWatch(RunDirectory(Path("/nowhere")), TrialLimits(**limits), began=0.0)
    found.add([_step(number, each) for number, each in enumerate(seconds, 1)], now=5.0)
    end = found.judge(at)
    return end.outcome if end else None


def test_a_trial_writes_nothing_beside_its_metrics_and_never_restarts() -> None:
    tree = {
        "checkpoint": {"every": 10, "store": "file:///x"},
        "telemetry": {"tensorboard": True, "wandb": {"mode": "offline"}},
        "train": {"global_batch": 8, "evaluate": {"every": 5}, "sample": {"tokens": 40}},
        "data": {"epochs": 2},
    }
    plan = Plan.model_validate(PLAN)
    recipe = trial_recipe(Recipe.model_validate(tree), TuneCandidate(plan=plan, workers=2))
    assert recipe.plan == plan
    assert recipe.data.workers == 2
    assert recipe.data.epochs == 0
    assert recipe.train.global_batch == 8
    assert recipe.checkpoint.is_off
    assert (recipe.checkpoint.memory, recipe.checkpoint.store) == (0, "")
    assert not recipe.train.save
    assert not recipe.train.sample_tokens
    assert not recipe.train.evaluate.batches
    assert not recipe.faults.restart
    assert not recipe.telemetry.tensorboard
    assert recipe.telemetry.wandb.mode == "off"
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize(
    ("seconds", "limits", "outcome"),
    [
        (COLD + 5 * [0.5], {}, "measured"),  # the spread of steps after the warm-up is 0
        (COLD + 4 * [0.5], {}, None),
        (COLD + 3 * [0.4, 0.6], {}, None),  # too much spread
        (COLD + MAX_STEADY_STEPS // 2 * [0.4, 0.6], {}, "measured"),
        (COLD + 3 * [0.4, 0.6], {"steady_seconds": 4.0}, "measured"),  # they began 5 s ago
        ([*COLD, 0.9, 0.95], {"best_seconds": 0.5}, "slower"),
        ([*COLD, 0.9, 0.6], {"best_seconds": 0.5}, None),  # one step is not so slow
        (COLD + 5 * [0.70, 0.72], {"best_seconds": 0.5}, "measured"),  # certainly slower, no more steps
        ([9.0, 2.0], {"deadline": 10.0}, "unfinished"),
        ([], {"start_seconds": 9.0}, "failed"),
        ([], {"start_seconds": 11.0}, None),
    ],
)
def test_a_trial_ends_when_it_knows_enough(seconds: list[float], limits: dict[str, float], outcome: str | None) -> None:
    assert watch(seconds, **limits) == outcome


def test_steps_before_the_deadline_count(tmp_path: Path) -> None:
    assert watch(COLD + 3 * [0.4, 0.6], deadline=10.0) == "measured"
    assert watch(COLD + 2 * [0.4, 0.6], deadline=10.0) == "unfinished"
    assert watch([], deadline=math.inf, at=800.0) is None


def test_the_written_recipe_is_the_users_own_with_the_plan_pinned(tmp_path: Path) -> None:
    text = (
        "name: mine\ntrain: {global_batch: 8, steps: 7}\ndata: {seq_len: 32}\ncluster: 2xcpu\nplan: {recompute: none}\n"
    )
    recipe = parse_recipe(text, name="x")
    plan = Plan.model_validate(PLAN | {"comm": {"bucket_mb": 2}, "loss": "chunked"})
    written = tuned_recipe_text(recipe, TuneCandidate(plan=plan, workers=2), remark="0.5 ms")
    assert written.startswith(HEADER)
    read = parse_recipe(written, name="y")
    assert read.plan == plan
    assert read.data.workers == 2
    assert (read.name, read.train.steps, read.train.global_batch, read.cluster) == ("mine", 7, 8, "2xcpu")
    assert "faults" not in written, "only what the user has set"
    same = tuned_recipe_text(recipe, TuneCandidate(plan=plan), remark="0.5 ms")
    assert "workers" not in same


def test_a_file_of_the_user_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "mine.yaml"
    refuse_other_file(path)
    write_tuned_recipe(path, f"{HEADER}: 1 ms\nname: a\n")
    refuse_other_file(path)  # our own may be replaced
    path.write_text("name: mine\n")
    with pytest.raises(UserError, match="A026"):
        refuse_other_file(path)
    with pytest.raises(UserError, match="A026"):
        refuse_other_file(tmp_path)


def test_two_tunings_do_not_measure_each_other(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "a", {"model": "x"}) as store:
        assert store.new_run().name == "trial-001"
        with pytest.raises(UserError, match="A040"), locked_folder(tmp_path / "a", {}):
            pass
    with locked_folder(tmp_path / "a", {}):
        pass
    (tmp_path / "a" / "trial-012").mkdir()
    with locked_folder(tmp_path / "a", {}) as store:
        assert store.new_run().name == "trial-013"


def test_a_candidate_is_described_by_what_differs() -> None:
    first = Plan.model_validate(PLAN)
    assert describe(TuneCandidate(plan=first), first) == "the planner's first choice"
    other = Plan.model_validate(PLAN | {"micro_batch": 2, "grad_accum": 2, "recompute": 2, "compile": True,
                                        "comm": {"overlap": False, "bucket_mb": 2}})  # fmt: skip
    text = describe(TuneCandidate(plan=other), first)
    assert text == "micro-batch 2 x 2, recompute every 2, compile on, bucket_mb 2, overlap off"
    loaders = TuneCandidate(plan=first, workers=2, origin="loader processes")
    assert describe(loaders, first) == "loader processes 2"


def test_keys_are_those_of_plan_and_loader_processes() -> None:
    plan = Plan.model_validate(PLAN)
    same = Plan.model_validate(PLAN | {"compile": False})
    assert TuneCandidate(plan=plan).key == TuneCandidate(plan=same, origin="compile").key
    assert TuneCandidate(plan=plan).key != TuneCandidate(plan=plan, workers=1).key
