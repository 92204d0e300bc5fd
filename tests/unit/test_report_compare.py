"""Runs beside each other: what differs, the curves by step, tokens and time, and the command that answers the same."""

import json
from pathlib import Path

import pytest

from tests.runs import PREDICTION, finished_run, new_run, start_ranks, step_metrics
from trimaran.app import main
from trimaran.core import Mesh, Plan, parse_recipe
from trimaran.runs import CATEGORIES, AttemptLog, Journal, RunDirectory, create_run
from trimaran.ui import GROUPS, at_step, compare_page, compare_runs, curve_plots, differences, facts_of


def other_run(path: Path) -> RunDirectory:
    """Return a run of the same recipe with another learning rate and another plan, and slower steps."""
    recipe = parse_recipe("name: other", name="test", overrides=["train.steps=10", "train.lr=0.5"])
    run = create_run(path, recipe, Plan(mesh=Mesh(dp_replicate=4), micro_batch=1, prediction=PREDICTION))
    start_ranks(run, world_size=4)
    with Journal(run, 0) as journal:
        for step in range(1, 6):
            journal.step(step_metrics(step, loss=3.0, seconds=2.0))
    return run


def test_only_what_differs_is_listed(tmp_path: Path) -> None:
    facts = compare_runs([finished_run(tmp_path / "a"), other_run(tmp_path / "b")])
    assert {row["field"]: row["values"] for row in facts["recipe"]}["train.lr"] == [1e-3, 0.5]
    assert "name" not in {row["field"] for row in facts["recipe"]}
    assert {row["field"]: row["values"] for row in facts["plan"]} == {
        "mesh.dp_replicate": [2, 4], "micro_batch": [2, 1]}  # fmt: skip
    assert [each["final_loss"] for each in facts["runs"]] == [0.5, 3.0]
    assert [each["world_size"] for each in facts["runs"]] == [2, 4]
    assert differences([{"a": {"b": 1}}, {"a": {"b": 1}}]) == []
    assert differences([{"a": {"b": 1}}, {}]) == [{"field": "a.b", "values": [1, None]}]


def test_curves_are_drawn_by_step_by_tokens_and_by_time(tmp_path: Path) -> None:
    facts = compare_runs([finished_run(tmp_path / "a"), other_run(tmp_path / "b")])
    tokens, seconds = (facts["axes"][name][1] for name in ("tokens", "seconds"))
    assert (tokens[-1], seconds[-1]) == ([5, 5 * 1024.0], [5, 10.0])
    assert at_step(seconds, 3) == pytest.approx(6.0)
    assert at_step(tokens, 2.5) == pytest.approx(2.5 * 1024)
    assert at_step([], 3) is None
    assert "10.2k" in curve_plots(facts, axis="tokens")
    assert "step 1" in curve_plots(facts, axis="step")
    page = compare_page(facts)
    assert page.count("<figure") == 7
    assert "train.lr" in page


def test_the_report_of_several_runs_is_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = finished_run(tmp_path / "a"), other_run(tmp_path / "b")
    assert main(["report", str(first.path), str(second.path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert [each["path_name"] for each in answer["runs"]] == ["a", "b"]
    assert main(["report", str(first.path), str(second.path)]) == 0
    assert (first.path / "compare.html").read_text().startswith("<!doctype html>\n")
    assert main(["report", str(first.path), str(second.path), "--steps", "1:2"]) == 2
    assert main(["report", *[str(first.path)] * 9, "--json"]) == 2
    assert capsys.readouterr().err.count("A042: ") == 1  # with --json a mistake is an object on standard output


def test_the_report_of_a_range_has_only_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path / "a")
    assert main(["report", str(run.path), "--steps", "3:5", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [step for step, _ in answer["curves"]["loss"]["points"]] == [3, 4, 5]
    assert answer["steps"] == 10


def test_the_waterfall_adds_up_to_all_time_since_the_run_was_made(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    attempts = AttemptLog(run)
    attempts.begin(world_size=2)
    start_ranks(run)
    with Journal(run, 0) as journal:
        journal.step(step_metrics(1, loss=2.0))
    attempts.end("stopped", step=1)
    attempts.over(75, "stopped")
    found = facts_of(run)["waterfall"]
    assert sum(group["seconds"] for group in found["groups"]) == pytest.approx(found["total"])
    assert [group["name"] for group in found["groups"]] == list(GROUPS)
    assert {each for group in GROUPS.values() for each in group} == {*CATEGORIES}
    assert found["groups"][0]["parts"]["before the first start"] >= 0
