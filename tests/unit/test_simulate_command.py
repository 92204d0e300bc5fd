"""`trimaran simulate`, and the planner's goal `goodput`."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import new_run
from trimaran.app import complete_plan, main
from trimaran.core import Plan, parse_recipe
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, outline_of
from trimaran.planner import Question, reliability_of, search

SMALL = ["--days", "3", "--runs", "2", "--seq-len", "4096", "--global-batch", "64"]


def answer_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["simulate", *arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["simulate", *arguments]) == 2
    return capsys.readouterr().err


def test_a_model_is_planned_and_simulated_and_the_same_seed_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["llama-3-8b", "--cluster", "8x8xH100", *SMALL]
    answer = answer_of(arguments, capsys)
    assert answer["plan"]["mesh"] != Plan().mesh.model_dump()
    assert 0.5 < answer["goodput"] < 1
    assert 0.2 < answer["step"]["mfu"] < 0.6
    assert answer["step"]["equal_nodes"] < answer["step"]["mean"] <= answer["step"]["quantiles"]["0.99"]
    assert sum(answer["time"].values()) == pytest.approx(1)
    assert answer_of(arguments, capsys) == answer
    assert answer_of([*arguments, "--seed", "5"], capsys)["step"] != answer["step"]


def test_the_answer_is_shown_and_written_with_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["simulate", "llama-3-8b", "--cluster", "64x8xH100", *SMALL, "--set", "plan.mesh.pp=4",
                 "--out", str(out)]) == 0  # fmt: skip
    shown = capsys.readouterr().out
    for word in ("goodput", "MTTR", "what a spare node is worth", "what the checkpoint interval is worth"):
        assert word in shown
    assert json.loads((out / "simulation.json").read_text())["plan"]["mesh"]["pp"] == 4
    with gzip.open(out / "step.trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {event["pid"] for event in events} == set(range(4))
    assert {"compute", "send"} <= {event.get("cat") for event in events}
    with gzip.open(out / "job.trace.json.gz", "rt") as file:
        assert {"train"} <= {event["name"] for event in json.load(file)["traceEvents"]}


def test_a_run_and_its_plan_file_are_simulated_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path / "run", world_size=16)
    for what in (run.path, run.plan):
        answer = answer_of([str(what), "--cluster", "9x8xH100", "--days", "1", "--runs", "1"], capsys)
        assert answer["plan"]["mesh"]["dp_replicate"] == 64  # four copies on eight nodes
        assert answer["spares"] == 1  # the ninth
        assert "4 copies" in answer["notes"][0]


def test_the_answer_of_plan_is_a_plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-8b", "--cluster", "2x8xH100", "--json"]) == 0
    file = tmp_path / "answer.json"
    file.write_text(capsys.readouterr().out)
    planned = json.loads(file.read_text())
    answer = answer_of([str(file), "--days", "1", "--runs", "1"], capsys)
    assert answer["plan"] == planned["plan"]
    assert answer["cluster"] == "2x8xH100"


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.json"
    for text in ("{", "[]", '{"plan": {"mesh": {"tp": "x"}}}', '{"plan": {}}'):
        wrong.write_text(text)
        assert "P080" in error_of([str(wrong)], capsys)
    assert "P080" in error_of([str(tmp_path / "none.json")], capsys)
    run = new_run(tmp_path / "run", world_size=64)
    assert "P081" in error_of([str(run.path), "--cluster", "2x8xH100"], capsys)
    (tmp_path / "file").touch()
    assert "P083" in error_of([str(run.path), "--cluster", "8x8xH100", "--days", "1", "--runs", "1",
                               "--out", str(tmp_path / "file")], capsys)  # fmt: skip
    assert "A012" in error_of(["lama-3-8b"], capsys)
    assert "P084" in error_of([str(run.path), "--cluster", "8x8xH100", "--mtbf", "0.01"], capsys)


def test_plans_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert "runs/mine" in complete_plan("runs/")
    assert "llama-3-8b" in complete_plan("llama-3-")


def test_the_goal_goodput_keeps_spares_where_failures_are_frequent() -> None:
    recipe = parse_recipe("", name="test", overrides=["data.seq_len=2048", "train.global_batch=1152"])
    question = Question(recipe=recipe, spec=None, outline=outline_of(PRESETS["llama-3.2-1b"]), for_trainer=False,
                        cluster=parse_cluster("9x8xH100"), goal="goodput", max_plans=1)  # fmt: skip
    rare, often = (search(replace(question, mtbf_hours=hours)) for hours in (1e9, 500.0))
    assert rare.cluster.num_nodes == 9
    assert often.cluster.num_nodes == 8
    asked = replace(question, mtbf_hours=500.0)
    with_spare = reliability_of(often.ranked[0], asked, often.cluster)
    without = reliability_of(rare.ranked[0], asked, question.cluster)
    assert (with_spare.spares, without.spares) == (1, 0)
    assert with_spare.seconds_per_new_step < without.seconds_per_new_step
