"""`trimaran decisions`: the table, the undo, the switch, and what `watch` and `report` show of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import finished_run
from trimaran.app import RunState, Status, command_of_decision, main, status_lines
from trimaran.autopilot import DecisionLedger
from trimaran.core import Decision
from trimaran.runs import RunDirectory, read_change_request, take_lease
from trimaran.ui import facts_of

KEPT = Decision(
    id=1,
    time=1000.0,
    step=40,
    finding="F006",
    reason="only 20% of the memory is in use",
    patch={"plan.micro_batch": 4, "plan.grad_accum": 2},
    undo={"plan.micro_batch": 1, "plan.grad_accum": 8},
    expected={"gain": 0.12, "uncertainty": 0.06, "step_seconds": 0.44},
    baseline={"step_seconds": 0.5, "spread": 0.02, "steps": 60},
    measured={"step_seconds": 0.41, "gain": 0.18, "confidence": 0.999, "steps": 24, "pause_seconds": 0.4},
    outcome="kept",
)
ADVISED = replace(KEPT, id=2, patch={"plan.compile": True}, undo={"plan.compile": False}, measured=None,
                  outcome="advised", reason="compiled code is faster")  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    found = finished_run(tmp_path / "run")
    ledger = DecisionLedger(found)
    for each in (KEPT, ADVISED):
        ledger.write(each)
    return found


def answer(capsys: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["decisions", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_every_decision_is_shown_with_reason_effect_and_outcome(run: RunDirectory, capsys: Any) -> None:
    assert main(["decisions", str(run.path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 kept step 40 micro_batch 1 -> 4, grad_accum 8 -> 2" in shown
    assert "why: only 20% of the memory is in use" in shown
    assert "expected: steps 12.0% shorter than 500 ms (give or take 6%)" in shown
    assert "measured: steps 18.0% shorter over 24 steps, 99.9% sure that they are shorter" in shown
    assert f"apply: trimaran train {run.recipe} --set plan.compile=true" in shown
    assert "autopilot advise: 1 kept, 1 advised; trials cost 400 ms" in shown


def test_json_has_the_decisions_with_their_commands(run: RunDirectory, capsys: Any) -> None:
    code, found = answer(capsys, str(run.path))
    assert (code, found["mode"], found["budget"]) == (0, "advise", 0.03)
    assert found["spent_seconds"] == pytest.approx(0.4)
    first, second = found["decisions"]
    assert first["measured"]["gain"] == 0.18
    assert first["command"] == f"trimaran train {run.recipe} --set plan.micro_batch=1 --set plan.grad_accum=8"
    assert second["command"] == f"trimaran train {run.recipe} --set plan.compile=true"


@pytest.mark.parametrize(
    ("status", "of_kept", "of_advised"),
    [("training", "decisions {run} --undo 1", "replan {run} --set plan.compile=true"),
     ("stopped", "resume {run} --set plan.micro_batch=1 --set plan.grad_accum=8",
      "resume {run} --set plan.compile=true")],
)  # fmt: skip
def test_the_command_of_a_decision_is_one_that_the_run_can_follow(
    status: Status, of_kept: str, of_advised: str, run: RunDirectory
) -> None:
    found = [command_of_decision(each, run, status) for each in (KEPT, ADVISED)]
    assert found == [f"trimaran {words.format(run=run.path)}" for words in (of_kept, of_advised)]


def test_undo_asks_the_ranks_as_the_user(run: RunDirectory, capsys: Any) -> None:
    with take_lease(run):
        code, found = answer(capsys, str(run.path), "--undo", "1")
    assert (code, found["request"]) == (0, 1)
    request = read_change_request(run)
    assert request is not None
    assert (request.by, request.patch) == ("user", KEPT.undo)
    assert "undo decision 1" in request.reason


@pytest.mark.parametrize(
    ("number", "says"),
    [("2", "it was advised"), ("7", "there is no such decision"), ("1", "the run is not running")],
)
def test_what_cannot_be_undone_is_a_clear_error(run: RunDirectory, capsys: Any, number: str, says: str) -> None:
    code, found = answer(capsys, str(run.path), "--undo", number)
    assert (code, found["error"]["code"]) == (2, "A033")
    assert says in found["error"]["what"]
    assert read_change_request(run) is None


def test_off_leaves_a_file_that_stops_the_autopilot(run: RunDirectory, capsys: Any) -> None:
    code, found = answer(capsys, str(run.path), "--off")
    assert (code, found["mode"]) == (0, "off")
    assert run.autopilot_off.exists()


def test_following_a_run_that_has_ended_shows_its_decisions(run: RunDirectory, capsys: Any) -> None:
    assert main(["decisions", str(run.path), "--follow"]) == 0
    assert "kept" in capsys.readouterr().out


def test_a_run_without_decisions_says_so(tmp_path: Path, capsys: Any) -> None:
    run = finished_run(tmp_path / "run")
    assert main(["decisions", str(run.path)]) == 0
    assert "has decided nothing in this run" in capsys.readouterr().out


def test_the_live_view_and_the_report_show_the_last_decision(run: RunDirectory) -> None:
    state = RunState(run)
    state.refresh()
    lines = [str(each) for each in status_lines(state)]
    assert any("1 of 2 kept; last: 2 advised: compile False -> True" in each for each in lines)
    facts = facts_of(run)
    assert facts["last_decision"].startswith("2 advised: compile False -> True")
    assert [each["outcome"] for each in facts["decisions"]] == ["kept", "advised"]


def test_train_takes_the_mode(capsys: Any) -> None:
    assert main(["train", "--autopilot", "fly", "--dry-run", "--json"]) == 2
    assert "'advise'" in json.loads(capsys.readouterr().out)["error"]["what"]
