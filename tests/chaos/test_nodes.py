"""Two machines and a wire between them: cut, slow, skewed; each of them lost. F13 to F17 of the fault matrix.

Machines are network namespaces with their own pids and host name; the run directory is shared, as on a cluster.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.nodes import Fleet, Machine, make_run
from tests.fault.harness import lines, wait_for
from trimaran.run import RunDirectory

ROOT_NEEDED = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists() or not shutil.which("ip"),
    reason="network namespaces and TUN devices need root",
)
pytestmark = [pytest.mark.chaos, ROOT_NEEDED]
SETTINGS = ("checkpoint.every=10", "faults.hang_seconds=20")


def losses(run: RunDirectory) -> list[float]:
    return [each["loss"] for each in lines(run.metrics)]


def attempts(run: RunDirectory) -> list[int]:
    """Return the number of ranks of each attempt."""
    return [each["world_size"] for each in lines(run.attempts) if "world_size" in each]


def finish(fleet: Fleet, seconds: float = 60.0) -> None:
    assert [machine.wait(seconds) for machine in fleet.machines] == [0, 0]


def test_two_nodes_train_what_one_trains(tmp_path: Path) -> None:
    both, alone = make_run(tmp_path / "both", "train.steps=30"), make_run(tmp_path / "alone", "train.steps=30")
    with Fleet(both) as fleet:
        finish(fleet)
    command = [sys.executable, "-m", "trimaran.launch", str(alone.path)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert losses(both) == losses(alone)
    assert attempts(both) == [2]


def test_a_cut_wire_is_told_on_both_sides_and_nobody_goes_on_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=120", *SETTINGS)
    with Fleet(run, "--node-wait", "60") as fleet:
        fleet.wait_for_step(15)
        coordinator, other = fleet.coordinator, fleet.other
        fleet.toggle_wire()
        cut = time.monotonic()
        wait_for(lambda: fleet.incidents and other.incidents(), 20)
        assert time.monotonic() - cut < 20
        wait_for(lambda: len([each for each in lines(run.attempts) if "ended" in each]) == 1, 20)
        before = fleet.step()
        time.sleep(4)
        assert fleet.step() == before  # nobody
        fleet.toggle_wire()
        assert fleet.wait_for_new_step() < 30
        finish(fleet)
        assert fleet.coordinator is coordinator
    (told,) = fleet.incidents
    assert (told.cause, told.action) == ("network", "waited")
    assert told.cost["seconds_to_detect"] < 20
    (theirs,) = other.incidents()
    assert (theirs["cause"], theirs["action"]) == ("network", "waited")
    assert attempts(run) == [2, 2]


def test_a_cut_wire_leaves_one_side_at_work_and_the_other_comes_back(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=400", *SETTINGS)
    with Fleet(run, "--min-nodes", "1") as fleet:
        fleet.wait_for_step(15)
        other = fleet.other
        fleet.toggle_wire()
        wait_for(lambda: len(attempts(run)) == 2, 30)
        fleet.wait_for_new_step()
        assert attempts(run) == [2, 1]
        assert len(list(run.lease.glob("term-*.json"))) == 1
        assert other.incidents()[0]["evidence"]["ranks_killed"]
        fleet.toggle_wire()
        wait_for(lambda: len(attempts(run)) == 3, 30)
        fleet.wait_for_new_step()
        finish(fleet)
    assert attempts(run) == [2, 1, 2]
    assert [(each.cause, each.action) for each in fleet.incidents] == [("network", "resized")]


@pytest.mark.parametrize("who", ["coordinator", "other"])
def test_a_lost_machine_does_not_end_the_run(tmp_path: Path, who: str) -> None:
    run = make_run(tmp_path / "run", "train.steps=150", *SETTINGS)
    with Fleet(run, "--min-nodes", "1") as fleet:
        fleet.wait_for_step(15)
        lost: Machine = getattr(fleet, who)
        (left,) = [each for each in fleet.machines if each is not lost]
        lost.lose()
        assert fleet.wait_for_new_step() < (30 if who == "coordinator" else 20)
        assert left.wait(60) == 0
    assert attempts(run) == [2, 1]
    (told,) = fleet.incidents
    assert (told.cause, told.action) == ("host", "resized")
    assert told.cost["seconds_to_recover"] < 30
    (resume,) = [each for each in lines(run.events(0)) if each["kind"] == "resume"]
    assert resume["data"]["tier"] == "memory", "the machine that is left has copies of the other one's share"
    assert told.cost["lost_steps"] <= 3
    assert [each["step"] for each in lines(run.metrics)] == [*range(1, 151)]
    assert len(list(run.lease.glob("term-*.json"))) == (2 if who == "coordinator" else 1)


def test_too_few_machines_end_in_the_code_for_another_start(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=500", *SETTINGS)
    with Fleet(run, "--node-wait", "4") as fleet:
        fleet.wait_for_step(15)
        coordinator, other = fleet.coordinator, fleet.other
        other.lose()
        assert coordinator.wait(30) == 75
    assert attempts(run) == [2]
    assert fleet.incidents[0].cause == "host"


def test_a_slow_and_lossy_wire_is_no_hang_and_is_told(tmp_path: Path) -> None:
    """200 ms there and back, every twentieth packet lost: a step has many of these, and takes seconds."""
    run = make_run(tmp_path / "run", "train.steps=8", "checkpoint.every=0", "train.save=false")
    with Fleet(run, wire=["--delay", "0.1", "--loss", "0.05", "--rate", "10"]) as fleet:
        assert [machine.wait(90) for machine in fleet.machines] == [0, 0]
    assert attempts(run) == [2]
    (told,) = fleet.incidents
    assert (told.cause, told.action) == ("network", "continued")
    assert "below plan" in told.what


@pytest.mark.parametrize("seconds", [-60.0, 60.0])
def test_a_clock_that_differs_and_jumps_changes_nothing(tmp_path: Path, seconds: float) -> None:
    run = make_run(tmp_path / "run", "train.steps=60", *SETTINGS)
    shifted = {"PYTHONPATH": f"{Path(__file__).parent / 'skewed'}", "SKEW_SECONDS": str(seconds)}
    with Fleet(run, environments=[{}, shifted]) as fleet:
        finish(fleet)
    assert attempts(run) == [2]
    assert [each.cause for each in fleet.incidents if "clock" not in each.what] == []
    assert [each for each in fleet.incidents if "clock" in each.what], fleet.incidents


def test_a_run_can_be_stopped_from_any_machine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=500", *SETTINGS)
    with Fleet(run) as fleet:
        fleet.wait_for_step(15)
        fleet.other.ask_to_stop()
        assert [machine.wait(30) for machine in fleet.machines] == [75, 75]
    (told,) = fleet.incidents
    assert (told.cause, told.action) == ("preempted", "saved")
    assert sorted(run.checkpoints.glob("step-*"))
