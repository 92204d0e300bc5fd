"""`trimaran drill` with every fault: on a run of its own, on another's run, and on one of two machines."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.fault_run import start_run
from tests.chaos.nodes import TwoMachines, make_run
from tests.chaos.test_nodes import ROOT_NEEDED
from tests.disks import mounted
from tests.fault.harness import ROOT, TINY, Supervised, lines, wait_for
from trimaran.app import KINDS, main
from trimaran.launch import process_state

pytestmark = pytest.mark.chaos
COMMAND = (sys.executable, "-m", "trimaran", "drill")


def test_a_run_of_its_own_survives_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: drilled")
    settings = [f"--set={each}" for each in (*TINY, "cluster=2xcpu", "plan.mesh.dp_replicate=2", "data.workers=1")]
    with mounted(tmp_path / "disk", "size=256m") as disk:
        code = main(["drill", str(recipe), "--all", "--json", "--no-check", f"--run-dir={disk / 'run'}", *settings])
        answer = json.loads(capsys.readouterr().out)
        drills = {each["kind"]: each for each in answer["drills"]}
        assert (code, answer["passed"], answer["skipped"]) == (0, True, []), answer
        assert drills.keys() == KINDS.keys() - {"cut", "kill-in-change"}
        assert all(each["suspects"] == [1] for name, each in drills.items() if KINDS[name].names_rank)  # pyrefly: ignore
        assert all(
            each["lost_steps"] == 0 for name, each in drills.items() if name in ("slow", "fill-disk", "terminate")
        )
        assert drills["kill"]["lost_steps"] <= 3
        ends = [each for each in lines(disk / "run" / "attempts.jsonl") if "over" in each]
        assert ends[-1]["over"] == 75  # the drill stopped its run, with a checkpoint
        assert not [
            each for each in psutil.process_iter(["cmdline"]) if str(disk) in " ".join(each.info["cmdline"] or [])
        ]


def test_a_run_that_a_fault_ends_is_left_to_its_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with start_run(tmp_path / "run", "train.steps=100000", "checkpoint.every=10") as supervised:
        supervised.wait_for_step(1)
        faults = ("--terminate", "--kill-supervisor", "--kill=1")
        assert main(["drill", str(supervised.run.path), *faults, "--yes", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert [each["fault"] for each in answer["drills"]] == ["kill 1", "terminate"]
        assert "exit code 75" in answer["drills"][1]["note"]
        assert [each["fault"] for each in answer["skipped"]] == ["kill-supervisor"]
        assert supervised.wait() == 75
    with Supervised.again(supervised.run, pause=0.05) as again:
        again.wait_for_events(0, "start", 3)
        assert main(["drill", str(supervised.run.path), "--kill-supervisor", "--yes", "--json"]) == 0
        assert "`trimaran resume` continues" in json.loads(capsys.readouterr().out)["drills"][0]["note"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_drill_that_is_killed_leaves_the_disk_free_and_the_run_alive(tmp_path: Path, number: signal.Signals) -> None:
    with (
        mounted(tmp_path / "disk", "size=64m") as disk,
        start_run(disk / "run", "train.steps=100000", "checkpoint.every=100000") as supervised,
    ):
        supervised.wait_for_step(20)
        for option in ("--fill-disk", "--slow=1=20x"):
            free = os.statvfs(disk).f_bfree
            command = [*COMMAND, str(supervised.run.path), option, "--yes"]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            pid = supervised.pid(1)
            wait_for(lambda: os.statvfs(disk).f_bfree < free / 8 or process_state(pid) == "T", 30)  # noqa: B023
            process.send_signal(number)
            assert process.wait(30) == (130 if number == signal.SIGTERM else -signal.SIGKILL)
            wait_for(lambda: os.statvfs(disk).f_bfree > free / 2, 10)  # noqa: B023
            before = supervised.step()
            supervised.wait_for_step(before + 10)  # a rank that stays stopped is found as any other hang


@ROOT_NEEDED
def test_a_node_that_is_cut_off_is_named_and_the_run_goes_on_with_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=100000", "checkpoint.every=10", "faults.hang_seconds=20")
    with TwoMachines(run, "--node-wait", "60") as machines:
        machines.wait_for_step(15, 60)
        machine = machines.other
        inside = next(each for each in psutil.Process(machine.process.pid).children(recursive=True))
        enter = ["nsenter", "-t", str(inside.pid), "--uts", "--pid", "--net", "--mount"]
        elsewhere = [*enter, *COMMAND, str(run.path), "--cut=elsewhere", "--yes"]
        wrong = subprocess.run(elsewhere, cwd=ROOT, capture_output=True, check=False, timeout=60)
        assert wrong.returncode == 2, wrong.stderr
        assert b"A001" in wrong.stderr
        other = [*enter, *COMMAND, str(run.path), f"--cut={machines.coordinator.address}", "--yes"]
        there = subprocess.run(other, cwd=ROOT, capture_output=True, check=False, timeout=60)
        assert b"S031" in there.stderr
        cut = [*enter, *COMMAND, str(run.path), f"--cut={machine.address}", "--yes", "--json", "--within=120"]
        done = subprocess.run(cut, cwd=ROOT, capture_output=True, check=False, timeout=200)
        assert done.returncode == 0, done
        (drill,) = json.loads(done.stdout)["drills"]
        assert drill["cause"] in ("network", "host")
        assert drill["named"]
        routes = subprocess.run([*enter, "ip", "route"], capture_output=True, check=True)
        assert b"blackhole" not in routes.stdout
        assert machines.world_size() == 2
        time.sleep(1)
        machines.wait_for_new_step()
    assert platform.node() not in {each["data"]["host"] for each in lines(run.events(0)) if each["kind"] == "start"}
