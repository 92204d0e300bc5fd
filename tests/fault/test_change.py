"""Changes of the plan of a run under its supervisor: asked for by a person, and with faults in the middle of one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fault.harness import Supervised, lines
from trimaran.app import main
from trimaran.core import Plan, Recipe, UserError
from trimaran.runs import change_answers, create_run, read_change_request, request_kill, write_change_request

PATCH = {"plan.mesh": {"dp_shard": 2}}


def answers(supervised: Supervised) -> list[dict[str, Any]]:
    return [event["data"] for event in change_answers(supervised.run)]


def assert_failed_and_restarted(supervised: Supervised, plan: Plan) -> None:
    """Fail unless the newest change has failed, and a restart continued `plan` without losing a step."""
    assert (answers(supervised)[-1]["status"], answers(supervised)[-1]["patch"]) == ("failed", PATCH)
    assert supervised.run.read_plan() == plan
    assert not supervised.run.change_request.exists()
    (incident,) = supervised.faults
    assert incident.action == "restarted"
    assert incident.cost["lost_steps"] == 0
    found = [line["step"] for line in lines(supervised.run.metrics)]
    assert found == list(range(1, len(found) + 1)), "every step once"


def test_a_person_changes_the_plan_of_a_running_run_and_a_rank_dies_in_a_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "run")
    with Supervised.start(tmp_path / "run", "train.steps=1000000", "checkpoint.memory=1", pause=0.05) as supervised:
        supervised.wait_for_step(3)
        assert main(["replan", path, "--set", "plan.micro_batch=2", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["status"], answer["how"], answer["id"]) == ("applied", "in place", 1)
        assert answer["patch"] == {"plan.micro_batch": 2, "plan.grad_accum": 2}
        assert answer["new"]["step_seconds"] > 0
        assert main(["replan", path, "--set", "plan.sharding=parameters"]) == 0
        shown = capsys.readouterr().out
        assert "rebuilt; training paused for" in shown
        assert "predicted:" in shown
        assert supervised.run.read_plan().mesh.dp_shard == 2
        assert main(["watch", path, "--json"]) == 0
        assert [each["id"] for each in json.loads(capsys.readouterr().out)["changes"]] == [1, 2]
        for settings, code in (
            (["plan.precision=bf16"], "S040"),
            (["plan.micro_batch=3", "plan.grad_accum=3"], "S041"),
            (["plan.mesh.tp=4"], "S043"),
            (["plan.nothing=1"], "R011"),
            (["micro_batch"], "R010"),
        ):
            options = [word for each in settings for word in ("--set", each)]
            assert main(["replan", path, *options, "--json"]) == 2
            assert json.loads(capsys.readouterr().out)["error"]["code"] == code
        assert main(["replan", path, "--set", "plan.sharding=parameters", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["status"] == "unchanged"
        assert main(["replan", path, "--ranks", "3", "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "S043"
        assert main(["replan", path, "--set", "plan.mesh.dp_replicate=2", "--set", "plan.mesh.dp_shard=1"]) == 0
        plan, earlier = supervised.run.read_plan(), len(supervised.run.earlier_plans())
        request_kill(supervised.run, 1, "release")
        write_change_request(supervised.run, PATCH)
        supervised.wait_for_fault(0)
        supervised.wait_for_step(supervised.step() + 3)
        assert_failed_and_restarted(supervised, plan)
        assert len(supervised.run.earlier_plans()) == earlier
        supervised.run.stop_request.touch()
        assert supervised.wait() == 75
    assert [each["status"] for each in answers(supervised)] == ["applied"] * 3 + ["failed"]
    assert [each.cause for each in supervised.faults] == ["crash", "preempted"]
    assert main(["replan", path, "--set", "plan.micro_batch=4", "--json"]) == 2
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["error"]["code"] == "S045"


@pytest.mark.chaos
def test_a_rank_that_runs_out_of_memory_in_a_change_restarts_the_old_plan_and_loses_nothing(tmp_path: Path) -> None:
    extra = {"TRIMARAN_TEST_PLUGIN": "tests.fault.change_plugin"}
    with Supervised.start(tmp_path / "run", "train.steps=40", pause=0.05, extra=extra) as supervised:
        plan = supervised.run.read_plan()
        supervised.wait_for_step(4)
        write_change_request(supervised.run, PATCH)
        assert supervised.wait() == 0
        (event,) = change_answers(supervised.run)
        assert event["step"] >= 4, "the step that the run goes on from"
        assert supervised.run.earlier_plans() == []
        assert_failed_and_restarted(supervised, plan)
        assert supervised.step() == 40


def test_a_person_replaces_a_request_of_the_autopilot_and_not_the_other_way_round(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", Recipe(), Plan())
    assert write_change_request(run, {"data.workers": 1}, by="autopilot", reason="slow data").id == 1
    assert write_change_request(run, {"data.workers": 2}).id == 2
    pending = read_change_request(run)
    assert pending is not None
    assert (pending.id, pending.by, pending.patch) == (2, "user", {"data.workers": 2})
    for by in ("autopilot", "user"):
        with pytest.raises(UserError) as caught:
            write_change_request(run, {"data.workers": 3}, by=by)
        assert caught.value.code == "S042"
