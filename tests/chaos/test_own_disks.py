"""Two machines without a shared disk: each has its own run directory, and cannot see that of the other."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.chaos.nodes import Machine, TwoMachines, make_run
from tests.chaos.test_nodes import ROOT_NEEDED, attempts, losses
from tests.chaos.wire import ADDRESSES
from tests.elastic_runs import assert_as_one_size, remove_pause
from tests.fault.harness import lines, wait_for
from trimaran.checkpoint import complete_steps, step_path
from trimaran.runs import RunDirectory

pytestmark = [pytest.mark.chaos, ROOT_NEEDED]
CANARY = "canary-token-0123456789-abcdef"
FLAGS = ("--own-disk", "--head", f"{ADDRESSES[0]}:29411", "--address", "auto")
MESHES = ["dp_replicate", "dp_shard"]


class OwnDisks:
    """The folders of two machines, and runs on both."""

    def __init__(self, path: Path, *settings: str) -> None:
        self.head, self.other = (RunDirectory(path / name / "run") for name in ("disk-a", "disk-b"))
        for each in (self.head, self.other):
            each.path.parent.mkdir()
        make_run(self.head.path, "checkpoint.every=5", *settings)
        self._caches = [{"TRIMARAN_CACHE": str(each.path.parent / "cache")} for each in (self.head, self.other)]

    def start(self, *flags: str, **variables: str) -> TwoMachines:
        environments = [each | {"TRIMARAN_RUN_TOKEN": CANARY} | variables for each in self._caches]
        return TwoMachines(self.head, *FLAGS, *flags, environments=environments, other_run=self.other)


def assert_equal_to_one_machine(head: RunDirectory, path: Path, *settings: str) -> None:
    alone = make_run(path, *settings)
    command = [sys.executable, "-m", "trimaran.launch", str(alone.path)]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
    assert losses(head) == losses(alone)
    ours, theirs = (load_file(run.model / "model.safetensors") for run in (head, alone))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def logs(machines: TwoMachines) -> str:
    return "\n".join(each.log.read_text() for each in machines.all)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_stops_resumes_and_ends_as_on_one_machine(tmp_path: Path, mesh: str) -> None:
    settings = ("train.steps=40", f"plan.mesh.{mesh}=2")
    disks = OwnDisks(tmp_path, *settings)
    with disks.start() as machines:
        machines.wait_for_step(12)
        machines.all[1].request_stop()
        assert [each.wait(180) for each in machines.all] == [75, 75], logs(machines)
    step = max(complete_steps(disks.head.checkpoints))
    assert step == max(complete_steps(disks.other.checkpoints))
    folders = [step_path(run.checkpoints, step) for run in (disks.head, disks.other)]
    names = [{each.name for each in folder.glob("rank-*")} for folder in folders]
    assert names == [{"rank-00000.safetensors"}, {"rank-00001.safetensors"}]
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    assert [*manifest["nodes"].values()] == [["rank-00000.safetensors"], ["rank-00001.safetensors"]]
    with disks.start() as machines:
        assert [each.wait(180) for each in machines.all] == [0, 0], logs(machines)
    resumed = [each["data"] for each in lines(disks.head.events(0)) if each["kind"] == "resume"]
    assert [(each["tier"], each["from_step"], each["refused"]) for each in resumed] == [("disk", step, [])]
    assert lines(disks.head.events(1)) == lines(disks.other.events(1)), "the head has what the other machine wrote"
    assert [each["kind"] for each in lines(disks.head.events(1))].count("start") == 2
    assert not disks.other.metrics.exists()
    assert_equal_to_one_machine(disks.head, tmp_path / "alone", *settings)
    assert_token_is_only_where_it_belongs(tmp_path)


def assert_token_is_only_where_it_belongs(path: Path) -> None:
    with_it = {each.name for each in path.rglob("*") if each.is_file() and CANARY.encode() in each.read_bytes()}
    assert with_it == {"token"}


def test_files_of_a_machine_that_lost_its_disk_are_named_and_nothing_is_discarded(tmp_path: Path) -> None:
    disks = OwnDisks(tmp_path, "train.steps=400")
    with disks.start() as machines:
        machines.wait_for_step(12)
        machines.all[0].request_stop()
        assert [each.wait(180) for each in machines.all] == [75, 75], logs(machines)
    step = max(complete_steps(disks.head.checkpoints))
    before = sorted(disks.head.checkpoints.rglob("*"))
    disks.other.path.rename(tmp_path / "taken-out")
    with disks.start() as machines:
        assert [each.wait(180) for each in machines.all] == [2, 2], logs(machines)
        name = re.escape(f"{machines.all[1].namespace}-{ADDRESSES[1]}")
    (error,) = [each["data"] for each in lines(disks.head.events(0)) if each["kind"] == "error"]
    assert error["code"] == "L025"
    missing = rf"step {step} are not here: rank-00001.safetensors on {name}; no older checkpoint is complete"
    assert re.search(missing, error["what"]), error
    assert sorted(disks.head.checkpoints.rglob("*")) == before
    shutil.rmtree(disks.other.path)
    (tmp_path / "taken-out").rename(disks.other.path)
    with disks.start() as machines:  # the machine is back with its disk
        wait_for(lambda: machines.step() > step + 3, 180)
        machines.all[0].request_stop()
        assert [each.wait(180) for each in machines.all] == [75, 75], logs(machines)


def test_a_machine_that_returns_with_an_empty_disk_gets_its_state_from_the_memory_of_the_other(tmp_path: Path) -> None:
    settings = ("train.steps=120", "faults.hang_seconds=20", "plan.mesh.dp_shard=2")
    disks = OwnDisks(tmp_path, *settings)
    with disks.start("--node-wait", "60") as machines:
        machines.wait_for_step(20)
        lost: Machine = machines.all[1]
        lost.lose()
        shutil.rmtree(disks.other.path)
        lost.come_back()
        assert machines.wait_for_new_step() < 40
        assert [each.wait(180) for each in machines.all] == [0, 0], logs(machines)
    assert attempts(disks.head) == [2, 2]
    (resumed,) = [each["data"] for each in lines(disks.head.events(0)) if each["kind"] == "resume"]
    assert resumed["tier"] == "memory"
    assert_equal_to_one_machine(disks.head, tmp_path / "alone", *settings)


def test_a_machine_that_joins_later_makes_the_run_larger(tmp_path: Path) -> None:
    settings = ("train.steps=150", "faults.ranks=[1, 2]")
    disks = OwnDisks(tmp_path, *settings)
    slow = {"TRIMARAN_TEST_PLUGIN": "tests.chaos.plugin", "TRIMARAN_TEST_PAUSE": "0.5"}
    with disks.start("--min-nodes", "1", "--node-wait", "60", **slow) as machines:
        machines.wait_for_step(5)
        machines.all[1].lose()
        wait_for(lambda: attempts(disks.head) == [2, 1], 120)
        machines.wait_for_new_step(120)
        shutil.rmtree(disks.other.path)
        machines.all[1].come_back()
        wait_for(lambda: attempts(disks.head) == [2, 1, 2], 120)
        machines.wait_for_new_step(120)
        for run in (disks.head, disks.other):
            remove_pause(run)
        assert [each.wait(180) for each in machines.all] == [0, 0], logs(machines)
    assert_as_one_size(disks.head, tmp_path / "calm")


def test_without_the_head_the_run_ends_and_continues_when_it_is_back(tmp_path: Path) -> None:
    settings = ("train.steps=60",)
    disks = OwnDisks(tmp_path, *settings)
    with disks.start("--node-wait", "45") as machines:  # also how long a node of a busy machine may take to start
        machines.wait_for_step(12)
        machines.all[0].lose()
        assert machines.all[1].wait(180) == 75, logs(machines)
        assert "cannot be reached" in machines.all[1].log.read_text()
        (incident,) = machines.all[1].incidents()
        assert incident["evidence"]["ranks_killed"]
    with disks.start() as machines:
        assert [each.wait(180) for each in machines.all] == [0, 0], logs(machines)
    assert_equal_to_one_machine(disks.head, tmp_path / "alone", *settings)
