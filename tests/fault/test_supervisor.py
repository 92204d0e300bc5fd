"""A supervisor, a fork server and two ranks for real, and what happens when something is broken on purpose.

A start costs an import of torch, so there are few runs and much happens in each. More seeds: `tests/chaos`.
"""

import os
import signal
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.fault.harness import Supervised, lines, wait_for
from tests.ranks import run_ranks
from tests.runs import new_run
from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_STUCK, Incident
from trimaran.data import cache_folder
from trimaran.launch.local import start_local
from trimaran.run import RunDirectory, create_run
from trimaran.run.lease import token_of
from trimaran.telemetry.ledger import ledger_of
from trimaran.train.process.rank_info import read_rank_info
from trimaran.train.worker import run_worker

STEPS = 100


def sail_undisturbed(path: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache_folder(os.environ))


def strike(sailing: Supervised, rank: int, number: signal.Signals, *, after: int) -> Incident:
    """Send a signal to a rank once a step is done; return the incident that follows, when somebody is named."""
    sailing.wait_for_step(after)
    before = len(sailing.troubles)
    os.kill(sailing.pid(rank), number)
    return wait_for(lambda: next((each for each in sailing.troubles[before:] if each.suspects), None), 30)


def test_a_run_comes_through_every_way_to_lose_a_rank_with_the_same_weights(tmp_path: Path) -> None:
    settings = (f"train.steps={STEPS}", "checkpoint.memory=1", "faults.hang_seconds=2")
    faults = "exit:1:8:0,abort:0:16:1"
    with Supervised.start(tmp_path / "run", *settings, fault=faults, pause=0.01) as sailing:
        for rank, step in ((1, 24), (0, 32)):
            sailing.wait_for_step(step)
            killed = time.time()
            assert strike(sailing, rank, signal.SIGKILL, after=step).time - killed < 1.0
        sailing.wait_for_step(36 + 20)  # so that the usual step is known
        stopped = time.time()
        hang = strike(sailing, 1, signal.SIGSTOP, after=0)
        assert time.time() - stopped < 10
        assert sailing.wait() == EXIT_DONE

    found = [(each.cause, each.suspects, each.victims) for each in sailing.troubles]
    assert found == [
        ("exit", (1,), (0,)),
        ("crash", (0,), (1,)),
        ("crash", (1,), (0,)),
        ("crash", (0,), (1,)),
        ("hang", (1,), (0,)),
    ]
    for incident in sailing.troubles:
        assert incident.action == "restarted"
        assert incident.cost["lost_steps"] <= 1
        assert incident.cost["seconds_to_recover"] < 20
    assert "trainer.py" in (sailing.run.incident(hang.id) / "rank-1.stacks.txt").read_text()
    assert (sailing.run.incident(hang.id) / "rank-0.json").exists()
    ledger = ledger_of(sailing.run)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.total, rel=0.01)
    # The hang: its step ends with the attempt, or late, since a stopped rank is woken before it is killed.
    assert ledger.seconds["restart"] + ledger.seconds["communication"] > 2
    assert any(each["ranks"].keys() == {"0", "1"} for each in lines(sailing.run.samples(0)))

    calm = create_run(tmp_path / "calm", sailing.run.read_recipe(), sailing.run.read_plan())
    assert run_ranks(2, sail_undisturbed, calm.path) == [EXIT_DONE, EXIT_DONE]
    ours, theirs = (load_file(run.model / "model.safetensors") for run in (sailing.run, calm))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.chaos
def test_a_fault_that_always_comes_back_ends_the_run_and_names_the_step(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=20", fault="kill:1:6") as sailing:
        assert sailing.wait() == EXIT_STUCK
    *restarted, last = sailing.troubles
    assert [each.action for each in restarted] == ["restarted"] * 3
    assert (last.action, last.suspects) == ("stopped", (1,))
    assert "step 6" in last.evidence["why"]
    assert "rank 1" in last.evidence["why"]


@pytest.mark.chaos
def test_a_rank_that_compiles_for_longer_than_a_step_may_take_has_not_hung(tmp_path: Path) -> None:
    settings = ("train.steps=20", "faults.hang_seconds=2")
    with Supervised.start(tmp_path / "run", *settings, fault="compile:1:6") as sailing:
        assert sailing.wait() == EXIT_DONE
    assert sailing.troubles == []
    seconds = [each["step_seconds"] for each in lines(sailing.run.metrics)]
    assert max(seconds) > 6, "all have waited for it"


def test_a_run_that_is_asked_to_end_before_it_began_starts_nothing_and_keeps_no_secret_in_the_open(
    tmp_path: Path,
) -> None:
    run = new_run(tmp_path / "run")
    sailing = start_local(run)
    sailing.request_stop()  # while it is being imported; schedulers may well say it twice
    sailing.request_stop()
    assert sailing.wait(30) == EXIT_AGAIN
    assert [each["over"] for each in lines(run.attempts)] == [EXIT_AGAIN]
    assert not run.events(0).exists()
    token = token_of(run)
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert [path for path in files if token in path.read_text()] == [run.lease / "token"]


def test_sigterm_to_one_rank_stops_all_at_the_same_step_with_a_checkpoint(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=100000", "data.workers=1") as sailing:
        sailing.wait_for_step(3)
        assert len(sailing.processes()) == 6  # fork server, ranks, loaders, sidecar
        os.killpg(sailing.pid(1), signal.SIGTERM)  # a whole process group, as schedulers do: loaders must not die of it
        assert sailing.wait(30) == EXIT_AGAIN
    (step,) = {each["step"] for rank in (0, 1) for each in sailing.events(rank, "stop")}
    (incident,) = sailing.troubles
    assert (incident.cause, incident.action, incident.step) == ("preempted", "saved", step)
    assert (sailing.run.checkpoints / f"step-{step:08d}" / "manifest.json").exists()
