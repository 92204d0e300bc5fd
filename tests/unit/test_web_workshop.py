"""The workshop answers what the commands answer, and starts only what it may."""

import json
import os
import shlex
import signal
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nicegui")

from tests.cases import slow
from trimaran.app import all_plans, as_dict, main, pareto_set
from trimaran.core import UserError, parse_recipe
from trimaran.planner import predicted
from trimaran.ui import (
    FOLDER,
    PIN_VALUES,
    TOP,
    PlanDesk,
    PlanInputs,
    RunsRoot,
    answer_markup,
    first_answer,
    launch_text,
    launch_words,
    memory_stack,
    pareto_figure,
    pin_values,
    recipe_text,
    search_plans,
    speaking,
    start_run,
    time_stack,
)

SMALL = PlanInputs(what="llama-3.2-1b", nodes=1, devices=4, seq_len=2048, global_batch=64)
searched = cache(search_plans)  # the same question always gets the same answer
INPUTS = [
    SMALL,
    replace(SMALL, goal="memory", pins=(("mesh.tp", "2"),)),
    slow(replace(SMALL, adapter="lora", device="A100-80GB")),
]


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("inputs", INPUTS)
def test_the_answer_is_that_of_trimaran_plan(inputs: PlanInputs, capsys: pytest.CaptureFixture[str]) -> None:
    mine = json.loads(json.dumps(as_dict(searched(inputs), top=TOP)))
    assert mine == printed(inputs.plan_words, capsys)
    assert shlex.split(inputs.command) == ["trimaran", *inputs.plan_words]


def test_every_plan_that_is_not_chosen_says_why() -> None:
    report = searched(SMALL)
    plans = all_plans(report)
    assert plans[0] == (report.best, "")
    assert len(plans) > 3
    assert all(why for _, why in plans[1:])


def test_the_pareto_set_is_what_no_other_plan_beats() -> None:
    plans = [plan for plan, _ in all_plans(searched(SMALL))]
    numbers = [(each.prediction.step_seconds, each.prediction.device_bytes) for each in plans if each.prediction]
    front = [(each.prediction.step_seconds, each.prediction.device_bytes) for each in pareto_set(plans)
             if each.prediction]  # fmt: skip
    fitting = [pair for pair, each in zip(numbers, plans, strict=True) if each.prediction and each.prediction.fits]
    for pair in set(fitting):
        beaten = any(other != pair and other[0] <= pair[0] and other[1] <= pair[1] for other in fitting)
        assert (pair in front) != beaten


def test_the_stacks_add_up_to_the_prediction() -> None:
    report = searched(SMALL)
    plans = [plan for plan, _ in all_plans(report)]
    memory, seconds = memory_stack(plans, report), time_stack(plans)
    for at, plan in enumerate(plans[: len(memory.categories)]):
        assert plan.prediction is not None
        assert sum(each.values[at] or 0 for each in memory.series) == pytest.approx(plan.prediction.device_bytes)
        assert sum(each.values[at] or 0 for each in seconds.series) == pytest.approx(plan.prediction.step_seconds)
    assert len(pareto_figure(all_plans(report), report).points) == len(plans)


def test_the_recipe_to_copy_trains_the_plan_that_is_shown() -> None:
    report = searched(replace(SMALL, steps=30))
    recipe = parse_recipe(recipe_text(report), name="copied")
    assert recipe.train.steps == 30
    assert recipe.cluster == "4xH100"
    assert report.best is not None
    assert recipe.plan == report.best.model_copy(update={"prediction": None})


@pytest.mark.parametrize("target", ["slurm", slow("k8s")])
def test_the_launch_file_is_that_of_trimaran_launch(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = searched(SMALL)
    found = printed(launch_words(report, target), capsys)
    assert launch_text(report, target) == found["files"][found["main"]]


CHANGES = [
    {"seq_len": 1024, "global_batch": 256},
    {"nodes": 2, "device": "A100-80GB", "pins": (("recompute", "full"), ("sharding", "parameters"))},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_the_first_answer_prices_known_plans_for_the_new_inputs(change: dict[str, Any]) -> None:
    inputs = replace(SMALL, **change)
    found = first_answer(inputs, searched(SMALL))
    assert found is not None
    question, best = found.request.question, found.best
    assert best is not None
    for plan, why in all_plans(found):
        assert plan == predicted(plan, found.answer.question)
        assert plan.mesh.world_size == inputs.nodes * inputs.devices
        assert plan.global_batch == inputs.global_batch
        assert all(str(getattr(plan, field)) == value for field, value in inputs.pins)
        assert plan is best or why
    fastest = searched(inputs).best
    assert fastest is not None
    assert fastest.prediction is not None
    assert best.prediction is not None
    assert best.prediction.step_seconds <= 1.5 * fastest.prediction.step_seconds
    assert question.cluster.world_size == best.mesh.world_size


def test_the_first_answer_is_none_if_no_known_plan_fits() -> None:
    assert first_answer(replace(SMALL, what="llama-3.1-70b", devices=1), searched(SMALL)) is None


def test_a_plan_can_be_pinned_and_released() -> None:
    report = searched(SMALL)
    other, _ = all_plans(report)[1]
    pinned = SMALL.with_plan(other)
    best = searched(pinned).best
    assert best is not None
    assert (best.mesh, best.sharding, best.micro_batch) == (other.mesh, other.sharding, other.micro_batch)
    assert SMALL.with_pin("mesh.tp", "2").with_pin("mesh.tp", "") == SMALL


@pytest.mark.parametrize("field", PIN_VALUES)
def test_every_value_of_a_pin_is_one_of_the_recipe(field: str) -> None:
    assert pin_values(field)
    for value in pin_values(field):
        parse_recipe("", name="pins", overrides=[f"plan.{field}={value}"])


@pytest.mark.parametrize(
    "what", ["../secret.yaml", "/etc/passwd", "recipes/../x.yaml", "~/.ssh/config.json", "org/model"]
)
def test_only_models_and_recipes_that_are_offered_are_read(what: str, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "x.yaml").write_text("name: x")
    with pytest.raises(UserError) as caught:
        PlanDesk().answer(replace(SMALL, what=what))
    assert caught.value.code == "W006"


def test_a_recipe_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    file = tmp_path / "recipes" / "mine.yaml"
    file.write_text("name: first\nmodel: {preset: tiny}\n")
    desk, inputs = PlanDesk(), PlanInputs(what="recipes/mine.yaml", nodes=1, devices=2, seq_len=256, global_batch=32)
    assert desk.answer(inputs).request.question.recipe.name == "first"
    assert desk.find(inputs) is not None
    file.write_text("name: second\nmodel: {preset: tiny}\n")
    os.utime(file, (time.time() + 5, time.time() + 5))
    assert desk.answer(inputs).request.question.recipe.name == "second"


def test_what_does_not_fit_says_what_is_missing() -> None:
    report = searched(replace(SMALL, what="llama-3.1-70b", devices=1))
    with speaking("en"):
        text = answer_markup(report, "command", "a note")
    assert 'role="alert"' in text
    with pytest.raises(UserError, match="no plan fits"):
        recipe_text(report)


def test_nothing_is_started_by_a_page_that_may_only_read(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        start_run(RunsRoot(tmp_path / "runs"), "name: x", "x", may_write=False)
    assert caught.value.code == "W007"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("recipe", ["name: x\ncluster: 64xH100\n", "name: [", "cluster: 2x2xcpu\n"])
def test_a_recipe_that_cannot_run_here_is_not_started(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        start_run(RunsRoot(tmp_path / "runs"), recipe, "x", may_write=True)
    assert not (tmp_path / "runs" / "x").exists()


def test_a_run_is_started_with_one_fixed_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\nprintf "%s\\n" $$ "$@" > {tmp_path}/words\nexec sleep 600\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    root = RunsRoot(tmp_path / "runs")
    started = start_run(root, "name: x\ncluster: 1xcpu\n", "x", may_write=True)
    until = time.monotonic() + 60
    while not (tmp_path / "words").exists() or (tmp_path / "words").read_text().count("\n") < 8:
        assert time.monotonic() < until
        time.sleep(0.01)
    pid, *words = (tmp_path / "words").read_text().splitlines()
    assert os.getsid(int(pid)) == int(pid), "it lives on when this server ends"
    os.kill(int(pid), signal.SIGKILL)
    file = str(root.path / FOLDER / "x.yaml")
    assert words == ["-m", "trimaran", "train", file, "--run-dir", str(started.path), "--quiet"]
    for name in ("../x", "a b", "-x", "x\n"):
        with pytest.raises(UserError):
            start_run(root, "name: x\ncluster: 1xcpu\n", name, may_write=True)
