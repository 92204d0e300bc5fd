"""Which fields may change on resume, and the state of a run that was started more than once."""

import json
import time
from pathlib import Path

import pytest

from tests.runs import finished_run, new_run, step_metrics
from trimaran.app import RunState, main, refuse_other_run
from trimaran.core import UserError, parse_recipe
from trimaran.runs import AttemptLog, IncidentLog, Journal, RunDirectory, take_lease


@pytest.mark.parametrize(
    "setting",
    ["train.steps=7", "cluster=2xcpu", "plan.mesh.tp=2", "checkpoint.every=5", "faults.cycles=9", "train.save=false",
     "train.evaluate.every=3", "train.sample.tokens=1", "data.workers=2", "nodes.order=measured"],
)  # fmt: skip
def test_steps_cluster_plan_and_checkpoints_may_change(setting: str) -> None:
    refuse_other_run(parse_recipe("", name="a"), parse_recipe("", name="b", overrides=[setting]), where="runs/a")


@pytest.mark.parametrize(
    "setting",
    ["train.lr=0.5", "train.seed=3", "train.global_batch=64", "data.seq_len=16", "model.preset=gpt2", "name=other",
     "model.shape={layers: 1}", "train.optimizer.beta1=0.5", "train.precision={lm_head: fp32}"],
)  # fmt: skip
def test_model_data_and_optimizer_may_not_change(setting: str) -> None:
    with pytest.raises(UserError, match="S001") as caught:
        refuse_other_run(parse_recipe("", name="a"), parse_recipe("", name="b", overrides=[setting]), where="runs/a")
    assert setting.partition("=")[0] in caught.value.what


@pytest.mark.parametrize(
    ("setting", "named"),
    [("model.adapter.rank=4", "model.adapter.rank"), ("model.adapter.path=x", "model.adapter.path"),
     ("model.adapter=null", "model.adapter")],
)  # fmt: skip
def test_the_adapter_may_not_change(setting: str, named: str) -> None:
    old = parse_recipe("model: {adapter: {rank: 8}}", name="a")
    new = parse_recipe("model: {adapter: {rank: 8}}", name="b", overrides=[setting])
    with pytest.raises(UserError, match="S001") as caught:
        refuse_other_run(old, new, where="runs/a")
    assert caught.value.what.startswith(f"{named} cannot change")


def test_a_finished_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path / "run")
    assert main(["resume", str(run.path)]) == 0
    assert "this run is done: all 10 steps" in capsys.readouterr().out
    assert main(["resume", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "done"


def test_for_a_finished_run_the_command_to_train_longer_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path / "run")
    main(["resume", str(run.path)])
    assert capsys.readouterr().out.endswith(f"To train longer: trimaran resume {run.path} --set train.steps=20\n")


def test_a_running_run_is_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path / "run")
    before = run.recipe.read_text()
    with take_lease(run):
        assert main(["resume", str(run.path), "--set", "train.steps=99"]) == 2
    assert "S020: this run is already running" in capsys.readouterr().err
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
    statuses = []

    def record() -> None:
        state.refresh()
        statuses.append(state.status)

    log.begin(world_size=1)
    record()
    train(run, 0, range(1, 6))
    record()
    with Journal(run, 0) as journal:
        journal.event("error", type="RuntimeError", message="broken")
    log.end("trouble", step=5)
    record()
    log.begin(world_size=1)
    record()
    train(run, 1, range(4, 8))
    record()
    log.end("stopped", step=7)
    log.over(75, "asked")
    record()
    log.begin(world_size=1)
    record()
    log.over(93, "no progress")
    record()
    assert statuses == [
        "starting", "training", "restarting", "restarting", "training", "stopped", "starting", "failed",
    ]  # fmt: skip
    assert [step.step for step in state.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert state.restarts == 1
    assert state_of(run).steps == state.steps


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


def test_a_run_with_more_steps_than_requested_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path / "run")
    assert main(["resume", str(run.path), "--set", "train.steps=4"]) == 0
    assert "this run has already made 10 steps, more than the requested 4" in capsys.readouterr().out


def test_for_a_batch_that_does_not_split_the_fix_lists_numbers_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run")
    assert main(["resume", str(run.path), "--set", "cluster=3xcpu", "--set", "plan.mesh.dp_replicate=3"]) == 2
    shown = capsys.readouterr().err
    assert "P006" in shown
    assert "resume with 1 or 2 or 4 or 8 or 32 data ranks" in shown
