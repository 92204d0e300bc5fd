"""A real supervisor, fork server and ranks, and what happens after injected faults.

Each start imports torch, so there are few runs with several faults each. More seeds: `tests/chaos`.
"""

import os
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.diagnosed_runs import findings
from tests.fault.harness import SECONDS, Supervised, has_ended, lines, wait_for
from tests.ranks import run_ranks
from tests.runs import new_run
from trimaran.checkpoint import complete_steps, verify
from trimaran.core import EXIT_AGAIN, EXIT_DONE
from trimaran.data import cache_folder
from trimaran.launch import start_local
from trimaran.planner import plan_with
from trimaran.runs import RunDirectory, create_run, read_ledger, run_token
from trimaran.train import read_rank_info, run_worker

HANG_SECONDS = 10.0  # a rank of a busy machine may seem to hang for a shorter time


def train_undisturbed(path: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache_folder(os.environ))


def test_a_run_survives_every_kind_of_lost_rank_with_the_same_weights(tmp_path: Path) -> None:
    settings = (
        "train.steps=30",
        "checkpoint.memory=1",
        f"faults.hang_seconds={HANG_SECONDS}",
        "telemetry.sample_seconds=0.2",
    )
    faults = "exit:1:4:0,abort:0:8:1,raise:1:12:2,kill:0:16:3,stop:1:20:4"
    with Supervised.start(tmp_path / "run", *settings, fault=faults) as supervised:
        assert supervised.wait() == EXIT_DONE

    found = [(each.cause, each.suspects, each.victims) for each in supervised.faults]
    assert found == [
        ("exit", (1,), (0,)),
        ("crash", (0,), (1,)),
        ("crash", (1,), (0,)),
        ("crash", (0,), (1,)),
        ("hang", (1,), (0,)),
    ]
    assert "ValueError: a planted fault" in supervised.faults[2].what
    for incident in supervised.faults:
        assert incident.action == "restarted"
        assert incident.cost["lost_steps"] <= 2, "a copy counts once all ranks have it"
    resumed = [each["data"] for each in supervised.events(0, "resume")]
    assert [each["tier"] for each in resumed] == ["memory"] * 5
    hang = supervised.faults[-1]
    assert "trainer.py" in (supervised.run.incident(hang.id) / "rank-1.stacks.txt").read_text()
    assert (supervised.run.incident(hang.id) / "rank-0.json").exists()
    ledger = read_ledger(supervised.run)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.total, rel=0.01)
    # The hang: its step ends with the attempt, or late, because a stopped rank is continued before it is killed.
    assert ledger.seconds["restart"] + ledger.seconds["communication"] > HANG_SECONDS
    assert any(each["ranks"].keys() == {"0", "1"} for each in lines(supervised.run.samples(0)))

    calm = create_run(tmp_path / "calm", supervised.run.read_recipe(), supervised.run.read_plan())
    assert run_ranks(2, train_undisturbed, calm.path) == [EXIT_DONE, EXIT_DONE]
    ours, theirs = (load_file(run.model / "model.safetensors") for run in (supervised.run, calm))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


def test_a_run_without_memory_continues_with_the_plan_that_the_doctor_names(tmp_path: Path) -> None:
    settings = ("train.steps=12", "plan.micro_batch=4", "plan.grad_accum=1")
    with Supervised.start(tmp_path / "run", *settings, fault="oom:1:6:0") as supervised:
        assert supervised.wait() == EXIT_DONE
    (incident,) = supervised.faults
    assert (incident.cause, incident.suspects, incident.action) == ("oom", (1,), "replanned")
    run = supervised.run
    before, after = (plan.model_copy(update={"prediction": None}) for plan in
                     (run.read_plan(run.earlier_plans()[0]), run.read_plan()))  # fmt: skip
    assert before != after
    assert after.global_batch == before.global_batch
    found = findings(run)["F062"]
    assert found.culprit == "rank 1"
    assert plan_with(before, found.patch) == after


def test_a_run_resumes_after_sigterm_and_after_its_supervisor_was_killed(tmp_path: Path) -> None:
    settings = ("train.steps=1000000", "checkpoint.every=10", "data.workers=1")
    with Supervised.start(tmp_path / "run", *settings, pause=0.02) as supervised:
        run = supervised.run
        supervised.wait_for_step(3)
        assert len(supervised.processes()) == 6  # fork server, ranks, loaders, sidecar
        # To the process group of one rank, as schedulers send it: loaders must not die from it.
        os.killpg(supervised.pid(1), signal.SIGTERM)
        assert supervised.wait() == EXIT_AGAIN
    (step,) = {each["step"] for rank in (0, 1) for each in supervised.events(rank, "stop")}
    (incident,) = supervised.faults
    assert (incident.cause, incident.action, incident.step) == ("preempted", "saved", step)
    assert verify(run.checkpoints / f"step-{step:08d}") == []

    with Supervised.again(run, pause=0.02) as supervised:
        wait_for(lambda: max(complete_steps(run.checkpoints)) > step)
        left = supervised.processes()
        supervised.process.kill()
        wait_for(lambda: all(map(has_ended, left)))
    kept = max(complete_steps(run.checkpoints))
    assert verify(run.checkpoints / f"step-{kept:08d}") == []

    with Supervised.again(run) as supervised:
        wait_for(lambda: max(complete_steps(run.checkpoints)) > kept)
        lost = supervised.wait_for_fault(1)
        run.stop_request.touch()
        assert supervised.wait() == EXIT_AGAIN
    assert [each["step"] for each in supervised.events(0, "ready")] == [0, step, kept]
    assert [each["data"]["tier"] for each in supervised.events(0, "resume")] == ["disk", "disk"]
    assert (lost.cause, lost.action) == ("host", "restarted")
    assert "the previous supervisor was killed" in lost.what
    found = [each["step"] for each in lines(run.metrics)]
    assert found == list(range(1, len(found) + 1))


@pytest.mark.chaos
def test_a_rank_that_compiles_for_longer_than_hang_seconds_is_not_hung(tmp_path: Path) -> None:
    settings = ("train.steps=20", "faults.hang_seconds=2")
    with Supervised.start(tmp_path / "run", *settings, fault="compile:1:6") as supervised:
        assert supervised.wait() == EXIT_DONE
    assert supervised.faults == []
    seconds = [each["step_seconds"] for each in lines(supervised.run.metrics)]
    assert max(seconds) > 6, "all ranks waited for it"


def test_a_run_that_is_asked_to_stop_before_its_start_starts_no_rank_and_leaks_no_token(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    supervised = start_local(run)
    supervised.request_stop()  # while the supervisor imports; schedulers may send it twice
    supervised.request_stop()
    assert supervised.wait(SECONDS) == EXIT_AGAIN
    assert [each["over"] for each in lines(run.attempts)] == [EXIT_AGAIN]
    assert not run.events(0).exists()
    token = run_token(run)
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert [path for path in files if token in path.read_text()] == [run.lease / "token"]
