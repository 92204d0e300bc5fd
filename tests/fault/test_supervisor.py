"""A real supervisor, fork server and two ranks, and what happens after injected faults.

Each start imports torch, so there are few runs with several faults each. More seeds: `tests/chaos`.
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
from trimaran.run.lease import run_token
from trimaran.telemetry.ledger import read_ledger
from trimaran.train.process.rank_info import read_rank_info
from trimaran.train.worker import run_worker

STEPS = 80


def train_undisturbed(path: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache_folder(os.environ))


def send_signal(supervised: Supervised, rank: int, number: signal.Signals, *, after: int) -> Incident:
    """Send a signal to a rank once a step is done; return the incident that follows, once it has a suspect."""
    supervised.wait_for_step(after)
    before = len(supervised.faults)
    os.kill(supervised.pid(rank), number)
    return wait_for(lambda: next((each for each in supervised.faults[before:] if each.suspects), None), 30)


def test_a_run_survives_every_kind_of_lost_rank_with_the_same_weights(tmp_path: Path) -> None:
    settings = (
        f"train.steps={STEPS}",
        "checkpoint.memory=1",
        "faults.hang_seconds=2",
        "telemetry.sample_seconds=0.2",
    )
    faults = "exit:1:4:0,abort:0:8:1"
    with Supervised.start(tmp_path / "run", *settings, fault=faults, pause=0.01) as supervised:
        for rank, step in ((1, 12), (0, 16)):
            supervised.wait_for_step(step)
            killed = time.time()
            assert send_signal(supervised, rank, signal.SIGKILL, after=step).time - killed < 5.0
        supervised.wait_for_step(20 + 20)  # so that the step time is known
        stopped = time.time()
        hang = send_signal(supervised, 1, signal.SIGSTOP, after=0)
        assert time.time() - stopped < 30
        assert supervised.wait() == EXIT_DONE

    found = [(each.cause, each.suspects, each.victims) for each in supervised.faults]
    assert found == [
        ("exit", (1,), (0,)),
        ("crash", (0,), (1,)),
        ("crash", (1,), (0,)),
        ("crash", (0,), (1,)),
        ("hang", (1,), (0,)),
    ]
    for incident in supervised.faults:
        assert incident.action == "restarted"
        assert incident.cost["lost_steps"] <= 1
        assert incident.cost["seconds_to_recover"] < 20
    assert "trainer.py" in (supervised.run.incident(hang.id) / "rank-1.stacks.txt").read_text()
    assert (supervised.run.incident(hang.id) / "rank-0.json").exists()
    ledger = read_ledger(supervised.run)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.total, rel=0.01)
    # The hang: its step ends with the attempt, or late, because a stopped rank is continued before it is killed.
    assert ledger.seconds["restart"] + ledger.seconds["communication"] > 2
    assert any(each["ranks"].keys() == {"0", "1"} for each in lines(supervised.run.samples(0)))

    calm = create_run(tmp_path / "calm", supervised.run.read_recipe(), supervised.run.read_plan())
    assert run_ranks(2, train_undisturbed, calm.path) == [EXIT_DONE, EXIT_DONE]
    ours, theirs = (load_file(run.model / "model.safetensors") for run in (supervised.run, calm))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.chaos
def test_a_repeated_fault_stops_the_run_and_names_the_step(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=20", fault="kill:1:6") as supervised:
        assert supervised.wait() == EXIT_STUCK
    *restarted, last = supervised.faults
    assert [each.action for each in restarted] == ["restarted"] * 3
    assert (last.action, last.suspects) == ("stopped", (1,))
    assert "step 6" in last.evidence["why"]
    assert "rank 1" in last.evidence["why"]


@pytest.mark.chaos
def test_a_rank_that_compiles_for_longer_than_hang_seconds_is_not_hung(tmp_path: Path) -> None:
    settings = ("train.steps=20", "faults.hang_seconds=2")
    with Supervised.start(tmp_path / "run", *settings, fault="compile:1:6") as supervised:
        assert supervised.wait() == EXIT_DONE
    assert supervised.faults == []
    seconds = [each["step_seconds"] for each in lines(supervised.run.metrics)]
    assert max(seconds) > 6, "all ranks waited for it"


def test_a_run_that_is_asked_to_stop_before_its_start_starts_no_rank_and_leaks_no_token(
    tmp_path: Path,
) -> None:
    run = new_run(tmp_path / "run")
    supervised = start_local(run)
    supervised.request_stop()  # while the supervisor imports; schedulers may send it twice
    supervised.request_stop()
    assert supervised.wait(30) == EXIT_AGAIN
    assert [each["over"] for each in lines(run.attempts)] == [EXIT_AGAIN]
    assert not run.events(0).exists()
    token = run_token(run)
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert [path for path in files if token in path.read_text()] == [run.lease / "token"]


def test_sigterm_to_one_rank_stops_all_at_the_same_step_with_a_checkpoint(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=100000", "data.workers=1") as supervised:
        supervised.wait_for_step(3)
        assert len(supervised.processes()) == 6  # fork server, ranks, loaders, sidecar
        os.killpg(
            supervised.pid(1), signal.SIGTERM
        )  # the process group, as schedulers do: loaders must not die from it
        assert supervised.wait(30) == EXIT_AGAIN
    (step,) = {each["step"] for rank in (0, 1) for each in supervised.events(rank, "stop")}
    (incident,) = supervised.faults
    assert (incident.cause, incident.action, incident.step) == ("preempted", "saved", step)
    assert (supervised.run.checkpoints / f"step-{step:08d}" / "manifest.json").exists()
