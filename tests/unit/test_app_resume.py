"""What may change on the way, and what a run looks like that was started more than once."""

import json
import time
from pathlib import Path

import pytest

from tests.runs import finished_run, new_run, step_metrics
from trimaran.app.commands.resume import refuse_other_run
from trimaran.app.main import main
from trimaran.app.views.run_state import RunState
from trimaran.core import UserError, parse_recipe
from trimaran.run import IncidentLog, Journal, RunDirectory
from trimaran.run.attempts import AttemptLog
from trimaran.run.lease import take


@pytest.mark.parametrize(
    "setting",
    ["train.steps=7", "cluster=2xcpu", "plan.mesh.tp=2", "checkpoint.every=5", "faults.cycles=9", "train.save=false",
     "train.evaluate.every=3", "train.sample.tokens=1", "data.workers=2"],
)  # fmt: skip
def test_how_long_and_where_may_change(setting: str) -> None:
    refuse_other_run(parse_recipe("", name="a"), parse_recipe("", name="b", overrides=[setting]), where="runs/a")


@pytest.mark.parametrize(
    "setting",
    ["train.lr=0.5", "train.seed=3", "train.global_batch=64", "data.seq_len=16", "model.preset=gpt2", "name=other",
     "model.shape={layers: 1}", "train.optimizer.beta1=0.5", "train.precision={lm_head: fp32}"],
)  # fmt: skip
def test_what_is_trained_may_not(setting: str) -> None:
    with pytest.raises(UserError, match="S001") as caught:
        refuse_other_run(parse_recipe("", name="a"), parse_recipe("", name="b", overrides=[setting]), where="runs/a")
    assert setting.partition("=")[0] in caught.value.what


def test_a_finished_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path / "run")
    assert main(["resume", str(run.path)]) == 0
    assert "this run is done: all of its 10 steps" in capsys.readouterr().out
    assert main(["resume", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "done"


def test_a_finished_run_that_is_to_go_on_tells_the_whole_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path / "run")
    main(["resume", str(run.path)])
    assert capsys.readouterr().out.endswith(f"To train on: trimaran resume {run.path} --set train.steps=20\n")


def test_a_run_that_somebody_runs_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path / "run")
    before = run.recipe.read_text()
    with take(run):
        assert main(["resume", str(run.path), "--set", "train.steps=99"]) == 2
    assert "S020: this run is at work" in capsys.readouterr().err
    assert run.recipe.read_text() == before


def state_of(run: RunDirectory) -> RunState:
    state = RunState(run)
    state.refresh()
    return state


def train(run: RunDirectory, attempt: int, steps: range) -> None:
    with Journal(run, 0, attempt=attempt) as journal:
        journal.event("start", world_size=1)
        journal.resume(steps.start - 1)
        journal.event("ready", step=steps.start - 1)
        for step in steps:
            journal.step(step_metrics(step, loss=float(step)))


def test_the_status_is_that_of_the_newest_attempt(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", world_size=1)
    log, state = AttemptLog(run), RunState(run)
    seen = []

    def look() -> None:
        state.refresh()
        seen.append(state.status)

    log.begin(world_size=1)
    look()
    train(run, 0, range(1, 6))
    look()
    with Journal(run, 0) as journal:
        journal.event("error", type="RuntimeError", message="broken")
    log.end("trouble", step=5)
    look()
    log.begin(world_size=1)
    look()
    train(run, 1, range(4, 8))
    look()
    log.end("stopped", step=7)
    log.over(75, "asked")
    look()
    log.begin(world_size=1)
    look()
    log.over(93, "no progress")
    look()
    assert seen == [
        "starting", "training", "restarting", "restarting", "training", "stopped", "starting", "failed",
    ]  # fmt: skip
    assert [step.step for step in state.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert state.restarts == 1
    assert state_of(run).losses == state.losses


def test_incidents_attempts_and_goodput_are_part_of_the_answer(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", world_size=1)
    log, incidents = AttemptLog(run), IncidentLog(run)
    log.begin(world_size=1)
    train(run, 0, range(1, 4))
    incident = incidents.notice("crash", "rank 0 was killed by SIGKILL", suspects=(0,))
    incidents.amend(incident, action="restarted", cost={"lost_steps": 1})
    log.end("trouble", step=3)
    time.sleep(0.01)
    log.begin(world_size=1)
    train(run, 1, range(3, 6))
    log.end("done", step=5)
    log.over(0, "done")
    answer = state_of(run).as_dict()
    assert (answer["status"], answer["steps"], answer["attempts"], answer["restarts"]) == ("done", 5, 2, 1)
    assert [each["cause"] for each in answer["incidents"]] == ["crash"]
    assert 0 < answer["goodput"] <= 1


def test_a_run_that_came_farther_says_how_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path / "run")
    assert main(["resume", str(run.path), "--set", "train.steps=4"]) == 0
    assert "this run has made 10 steps already, and 4 were asked for" in capsys.readouterr().out


def test_a_batch_that_does_not_split_is_answered_with_numbers_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run")
    assert main(["resume", str(run.path), "--set", "cluster=3xcpu", "--set", "plan.mesh.dp_replicate=3"]) == 2
    shown = capsys.readouterr().err
    assert "P006" in shown
    assert "go on with 1 or 2 or 4 or 8 or 32 data ranks" in shown
