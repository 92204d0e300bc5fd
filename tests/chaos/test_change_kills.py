"""A rank is killed at each phase of a live change of the plan; training stays that of an undisturbed run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.changes import request_after
from tests.chaos.fault_run import remove_pause, start_run
from tests.fault.harness import Supervised, lines, wait_for
from tests.ranks import run_ranks
from trimaran.app import main
from trimaran.core import EXIT_DONE, Plan
from trimaran.data import cache_folder
from trimaran.runs import (
    CHANGE_PHASES,
    ChangePhase,
    RunDirectory,
    change_answers,
    create_run,
    read_incidents,
    request_kill,
    write_change_request,
)
from trimaran.train import read_rank_info, run_worker

pytestmark = pytest.mark.chaos

COMMITTED = ("files", "switch", "answer")  # from here on the new plan is that of the run


def other_plan(run: RunDirectory) -> dict[str, Any]:
    """Return a change from replicas to shards, or back: half of the state moves to the other rank."""
    shards = run.read_plan().mesh.dp_shard
    return {"plan.mesh.dp_shard": 2 if shards == 1 else 1, "plan.mesh.dp_replicate": 1 if shards == 1 else 2}


def kill_in_change(supervised: Supervised, rank: int, phase: ChangePhase) -> str:
    """Have `rank` die at `phase` of a change, wait until the run continues, and return the answer to the change."""
    run, known = supervised.run, len(supervised.faults)
    before = run.read_plan()
    request_kill(run, rank, phase)
    request = write_change_request(run, other_plan(run))
    incident = supervised.wait_for_fault(known, 90)
    assert (incident.cause, incident.suspects) == ("crash", (rank,)), (phase, incident)
    assert incident.cost["lost_steps"] <= 1, (phase, incident)
    assert not run.kill_request.exists()
    answers = wait_for(lambda: [each["data"] for each in change_answers(run) if each["data"]["id"] == request.id])
    (answer,) = answers
    assert (run.read_plan() == before) == (answer["status"] == "failed"), (phase, answer)
    supervised.wait_for_step(supervised.step() + 3)
    return answer["status"]


def losses(run: RunDirectory) -> dict[int, set[float]]:
    """Return the losses of every step; a step that was repeated may have two."""
    found: dict[int, set[float]] = {}
    for line in lines(run.metrics):
        found.setdefault(line["step"], set()).add(line["loss"])
    return found


def applied_changes(run: RunDirectory) -> dict[int, dict[str, Any]]:
    """Return the patches that were applied, by the last step before them.

    Ranks that start again after a change answer with the step that they start from: the first one under the new plan if
    it was copied before the kill, and so is not lost.
    """
    answers = [each for each in change_answers(run) if each["data"]["status"] == "applied"]
    kept = {each.step for each in read_incidents(run) if not each.cost["lost_steps"]}
    return {each["step"] - (each["step"] in kept): each["data"]["patch"] for each in answers}


def train_without_kills(run: RunDirectory, plan: Plan, path: Path) -> RunDirectory:
    """Train a run like `run`, whose first plan was `plan`, with the same changes and no kills."""
    calm = create_run(path, run.read_recipe(), plan)
    assert run_ranks(2, _train_with_changes, calm.path, applied_changes(run)) == [EXIT_DONE] * 2
    return calm


def _train_with_changes(path: Path, changes: dict[int, dict[str, Any]]) -> int:
    run = RunDirectory(path)
    request_after(run, {step - 2: patch for step, patch in changes.items()})  # the ranks agree with the next step
    return run_worker(run, read_rank_info(os.environ), cache=cache_folder(os.environ))


def test_a_rank_that_dies_at_any_phase_of_a_change_costs_at_most_a_step_and_no_bit(tmp_path: Path) -> None:
    kills = [(rank, phase) for phase in CHANGE_PHASES for rank in (0, 1) if (rank, phase) != (1, "files")]
    with start_run(tmp_path / "run", "train.steps=400", "checkpoint.memory=1") as supervised:
        first = supervised.run.read_plan()
        supervised.wait_for_step(5)
        for rank, phase in kills:
            status = kill_in_change(supervised, rank, phase)
            if phase != "commit":  # the other rank may have written the plan by then
                assert status == ("applied" if phase in COMMITTED else "failed"), (rank, phase)
        remove_pause(supervised)
        assert supervised.wait(120) == EXIT_DONE
        assert len(supervised.faults) == len(kills)
    calm = train_without_kills(supervised.run, first, tmp_path / "calm")
    assert applied_changes(calm) == applied_changes(supervised.run), "the plans of both runs change at the same steps"
    assert losses(supervised.run) == losses(calm)
    ours, theirs = (load_file(each.model / "model.safetensors") for each in (supervised.run, calm))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if (ours[name] != theirs[name]).any()] == []


def test_a_drill_kills_a_rank_inside_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with start_run(tmp_path / "run", "train.steps=100000", "checkpoint.memory=1") as supervised:
        supervised.wait_for_step(1)
        path, kills = str(supervised.run.path), ("1=hand-over", "0=switch")
        assert main(["drill", path, *(f"--kill-in-change={each}" for each in kills), "--yes", "--json"]) == 0
        drills = json.loads(capsys.readouterr().out)["drills"]
        assert [each["fault"] for each in drills] == [f"kill-in-change {each}" for each in kills]
        assert [each["suspects"] for each in drills] == [[1], [0]]
        assert [each["data"]["status"] for each in change_answers(supervised.run)] == ["failed", "applied"]
