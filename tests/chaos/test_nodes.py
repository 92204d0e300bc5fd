"""Two machines: cut and slow networks, skewed clocks, lost machines; `network-cut` to `two-runs` in the guide.

Machines are network namespaces with their own pids and host name; the run directory is shared, as on a cluster.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.nodes import Machine, TwoMachines, make_run
from tests.fault.harness import lines, wait_for
from trimaran.checkpoint import complete_steps
from trimaran.runs import RunDirectory, read_incidents

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


def finish(machines: TwoMachines, seconds: float = 180.0) -> None:
    assert [machine.wait(seconds) for machine in machines.all] == [0, 0]


def test_two_nodes_have_the_same_losses_as_one(tmp_path: Path) -> None:
    both, alone = make_run(tmp_path / "both", "train.steps=30"), make_run(tmp_path / "alone", "train.steps=30")
    with TwoMachines(both, "--address", "auto") as machines:
        finish(machines)
        assert machines.coordinator in machines.all  # at an address of the wire, which nobody told it
    command = [sys.executable, "-m", "trimaran.launch", str(alone.path)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert losses(both) == losses(alone)
    assert attempts(both) == [2]


def test_a_network_cut_is_reported_on_both_sides_and_no_side_continues_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=120", *SETTINGS)
    with TwoMachines(run, "--node-wait", "60") as machines:
        machines.wait_for_step(15)
        coordinator, other = machines.coordinator, machines.other
        machines.toggle_wire()
        cut = time.monotonic()
        wait_for(lambda: machines.incidents and other.incidents(), 20)
        assert time.monotonic() - cut < 20
        wait_for(lambda: len([each for each in lines(run.attempts) if "ended" in each]) == 1, 20)
        before = machines.step()
        time.sleep(4)
        assert machines.step() == before  # no side continues
        machines.toggle_wire()
        assert machines.wait_for_new_step() < 30
        finish(machines)
        assert machines.coordinator is coordinator
    (incident,) = machines.incidents
    assert (incident.cause, incident.action) == ("network", "waited")
    assert incident.cost["seconds_to_detect"] < 20
    (other_incident,) = other.incidents()
    assert (other_incident["cause"], other_incident["action"]) == ("network", "waited")
    assert attempts(run) == [2, 2]


def test_after_a_network_cut_one_side_continues_and_the_other_rejoins(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=400", *SETTINGS)
    with TwoMachines(run, "--min-nodes", "1") as machines:
        machines.wait_for_step(15)
        other = machines.other
        machines.toggle_wire()
        wait_for(lambda: len(attempts(run)) == 2, 30)
        machines.wait_for_new_step()
        assert attempts(run) == [2, 1]
        assert len(list(run.lease.glob("term-*.json"))) == 1
        assert other.incidents()[0]["evidence"]["ranks_killed"]
        machines.toggle_wire()
        wait_for(lambda: len(attempts(run)) == 3, 30)
        machines.wait_for_new_step()
        finish(machines)
    assert attempts(run) == [2, 1, 2]
    assert [(each.cause, each.action) for each in machines.incidents] == [("network", "resized")]


@pytest.mark.parametrize("who", ["coordinator", "other"])
def test_a_lost_machine_does_not_end_the_run(tmp_path: Path, who: str) -> None:
    run = make_run(tmp_path / "run", "train.steps=150", *SETTINGS)
    with TwoMachines(run, "--min-nodes", "1") as machines:
        machines.wait_for_step(15)
        lost: Machine = getattr(machines, who)
        (left,) = [each for each in machines.all if each is not lost]
        lost.lose()
        assert machines.wait_for_new_step() < (30 if who == "coordinator" else 20)
        assert left.wait(60) == 0
    assert attempts(run) == [2, 1]
    (incident,) = machines.incidents
    assert (incident.cause, incident.action) == ("host", "resized")
    assert incident.cost["seconds_to_recover"] < 30
    (resume,) = [each for each in lines(run.events(0)) if each["kind"] == "resume"]
    assert resume["data"]["tier"] == "memory", "the remaining machine has copies of the other's state"
    assert incident.cost["lost_steps"] <= 3
    assert [each["step"] for each in lines(run.metrics)] == [*range(1, 151)]
    assert len(list(run.lease.glob("term-*.json"))) == (2 if who == "coordinator" else 1)


def test_too_few_machines_end_with_exit_code_75(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=500", *SETTINGS)
    with TwoMachines(run, "--node-wait", "4") as machines:
        machines.wait_for_step(15)
        coordinator, other = machines.coordinator, machines.other
        other.lose()
        assert coordinator.wait(30) == 75
    assert attempts(run) == [2]
    assert machines.incidents[0].cause == "host"


def test_a_slow_and_lossy_network_is_reported_and_no_hang(tmp_path: Path) -> None:
    """200 ms round trip and 5 % loss: a step takes seconds."""
    run = make_run(tmp_path / "run", "train.steps=8", "checkpoint.every=0", "train.save=false")
    with TwoMachines(run, wire=["--delay", "0.1", "--loss", "0.05", "--rate", "10"]) as machines:
        assert [machine.wait(90) for machine in machines.all] == [0, 0]
    assert attempts(run) == [2]
    (incident,) = machines.incidents
    assert (incident.cause, incident.action) == ("network", "continued")
    assert "below plan" in incident.what


@pytest.mark.parametrize("seconds", [-60.0, 60.0])
def test_a_clock_that_differs_and_jumps_changes_nothing(tmp_path: Path, seconds: float) -> None:
    run = make_run(tmp_path / "run", "train.steps=60", *SETTINGS)
    shifted = {"PYTHONPATH": f"{Path(__file__).parent / 'skewed'}", "SKEW_SECONDS": str(seconds)}
    with TwoMachines(run, environments=[{}, shifted]) as machines:
        finish(machines)
    assert attempts(run) == [2]
    assert [each.cause for each in machines.incidents if "clock" not in each.what] == []
    assert [each for each in machines.incidents if "clock" in each.what], machines.incidents


def test_a_run_can_be_stopped_from_any_machine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=500", *SETTINGS)
    with TwoMachines(run) as machines:
        machines.wait_for_step(15)
        machines.other.request_stop()
        assert [machine.wait(30) for machine in machines.all] == [75, 75]
    (incident,) = machines.incidents
    assert (incident.cause, incident.action) == ("preempted", "saved")
    assert sorted(run.checkpoints.glob("step-*"))


def test_a_directory_that_is_moved_on_the_shared_disk_stops_all_machines(tmp_path: Path) -> None:
    """Fault `run-directory-moved`."""
    run, new = make_run(tmp_path / "run", "train.steps=5000", *SETTINGS), RunDirectory(tmp_path / "elsewhere")
    with TwoMachines(run) as machines:
        machines.wait_for_step(15)
        run.path.rename(new.path)
        assert [machine.wait(60) for machine in machines.all] == [75, 75]
    assert not run.path.exists()
    (incident,) = (each for each in read_incidents(new) if each.cause == "storage")
    assert (incident.action, str(new.path) in incident.what) == ("saved", True)
    steps = [each["step"] for each in lines(new.metrics)]
    assert steps == list(range(1, steps[-1] + 1))
    assert max(complete_steps(new.checkpoints)) == steps[-1]
