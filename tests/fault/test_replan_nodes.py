"""Changes of the plan of a run on two nodes: network namespaces with a link between them, and real supervisors."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.nodes import TwoMachines, make_run
from tests.chaos.test_nodes import ROOT_NEEDED
from tests.chaos.test_own_disks import OwnDisks
from tests.elastic_runs import assert_as_one_size, remove_pause
from tests.fault.harness import lines
from trimaran.app import main
from trimaran.runs import ChangePhase, RunDirectory, change_answers, request_kill, write_change_request

pytestmark = [pytest.mark.chaos, ROOT_NEEDED]
HEADS = "model.shape={layers: 2, hidden: 32, heads: 4, kv_heads: 4, ffn: 64}"
SLOW = {"TRIMARAN_TEST_PLUGIN": "tests.chaos.plugin", "TRIMARAN_TEST_PAUSE": "0.3"}  # until `remove_pause`


def answers(run: RunDirectory) -> list[dict[str, Any]]:
    return [event["data"] for event in change_answers(run)]


def replan(run: RunDirectory, capsys: pytest.CaptureFixture[str], *settings: str) -> str:
    """Change the plan as a user does, wait for the ranks, and return how they did it."""
    options = [word for each in settings for word in ("--set", each)]
    code = main(["replan", str(run.path), *options, "--json"])
    shown = capsys.readouterr().out
    assert code == 0, shown
    return json.loads(shown)["how"]


def logs(machines: TwoMachines) -> str:
    return "\n".join(each.log.read_text()[-4000:] for each in machines.all)


def finish(machines: TwoMachines, *runs: RunDirectory) -> None:
    for run in runs:
        remove_pause(run)
    assert [machine.wait(180) for machine in machines.all] == [0, 0], logs(machines)


def test_two_nodes_change_their_plan_in_place_and_rebuilt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "train.steps=30", "plan.mesh.dp_replicate=2")
    with TwoMachines(run, "--no-check", environments=(SLOW, SLOW)) as machines:
        machines.wait_for_step(2)
        assert replan(run, capsys, "plan.micro_batch=2") == "in place"
        assert replan(run, capsys, "plan.mesh.tp=2") == "rebuilt"
        assert run.read_plan().mesh.tp == 2
        finish(machines, run)
    assert [each["status"] for each in answers(run)] == ["applied", "applied"]
    assert_as_one_size(run, tmp_path / "calm")


def test_two_nodes_with_two_ranks_each_change_to_other_meshes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", "train.steps=60", "cluster=2x2xcpu", "plan.mesh.dp_shard=4", HEADS)
    with TwoMachines(run, "--no-check", environments=(SLOW, SLOW)) as machines:
        machines.wait_for_step(2)
        for settings in (
            ("plan.mesh.tp=2",),  # inside of a node
            ("plan.mesh.pp=2", "plan.mesh.tp=2"),  # stages on different nodes
            ("plan.mesh.tp=4", "plan.mesh.pp=1"),  # across nodes
            ("plan.mesh.tp=1", "plan.mesh.dp_replicate=2", "plan.mesh.dp_shard=2"),
        ):
            assert replan(run, capsys, *settings) == "rebuilt"
        finish(machines, run)
    assert [each["status"] for each in answers(run)] == ["applied"] * 4
    assert len(run.earlier_plans()) == 4
    assert_as_one_size(run, tmp_path / "calm")


@pytest.mark.parametrize("phase", ["build", "release"])
def test_a_rank_of_the_other_node_that_dies_in_a_change_restarts_the_old_plan_and_loses_nothing(
    tmp_path: Path, phase: ChangePhase
) -> None:
    run = make_run(tmp_path / "run", "train.steps=40", "plan.mesh.dp_replicate=2")
    plan = run.read_plan()
    with TwoMachines(run, "--no-check") as machines:
        machines.wait_for_step(4)
        request_kill(run, 1, phase)
        write_change_request(run, {"plan.mesh": {"tp": 2}})
        assert [machine.wait(180) for machine in machines.all] == [0, 0], logs(machines)
    (answer,) = answers(run)
    assert answer["status"] == "failed"
    assert run.read_plan() == plan
    assert not run.change_request.exists()
    faults = [each for each in machines.incidents if each.cause not in ("straggler", "network")]
    assert [(each.action, each.cost["lost_steps"]) for each in faults] == [("restarted", 0)]
    (resumed,) = [each["data"] for each in lines(run.events(0)) if each["kind"] == "resume"]
    assert resumed["tier"] == "memory"
    assert_as_one_size(run, tmp_path / "calm")


def test_nodes_with_their_own_disks_change_their_plan_and_resume_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disks = OwnDisks(tmp_path, "train.steps=40", "plan.mesh.dp_replicate=2")
    with disks.start("--no-check", **SLOW) as machines:
        machines.wait_for_step(2)
        assert replan(disks.head, capsys, "plan.micro_batch=2") == "in place"
        assert replan(disks.head, capsys, "plan.mesh.tp=2") == "rebuilt"
        assert disks.other.read_plan() == disks.head.read_plan()
        assert disks.other.read_plan().mesh.tp == 2
        machines.all[1].request_stop()
        assert [each.wait(180) for each in machines.all] == [75, 75], logs(machines)
    with disks.start("--no-check") as machines:
        assert [each.wait(180) for each in machines.all] == [0, 0], logs(machines)
    assert_as_one_size(disks.head, tmp_path / "calm")
