"""The state of a run, read from its files."""

import json
import math
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import finished_run, new_run, start_ranks, step_metrics
from trimaran.app import RunState
from trimaran.core import UserError
from trimaran.runs import Journal, RunDirectory


def state_of(run: RunDirectory) -> RunState:
    state = RunState(run)
    state.refresh()
    return state


def test_a_run_without_a_rank_is_starting(tmp_path: Path) -> None:
    assert state_of(new_run(tmp_path / "run")).status == "starting"


def test_refresh_reads_only_what_is_new(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    start_ranks(run)
    state = state_of(run)
    with Journal(run, 0) as journal:
        journal.step(step_metrics(1, loss=4.0))
        state.refresh()
        assert (state.status, [step.loss for step in state.steps]) == ("training", [4.0])
        journal.step(step_metrics(2, loss=3.0))
        state.refresh()
    assert [step.loss for step in state.steps] == [4.0, 3.0]
    assert len(state.events_of_kind("start")) == 2


def test_the_measurements_of_a_finished_run_have_the_names_of_the_prediction(tmp_path: Path) -> None:
    answer = state_of(finished_run(tmp_path / "run")).as_dict()
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    assert answer["status"] == "done"
    assert (answer["first_loss"], answer["final_loss"], answer["held_out_loss"]) == (5.0, 0.5, 0.625)
    assert answer["measured"] == {"step_seconds": 0.5, "peak_bytes": 110 << 20, "tokens_per_second": 2048.0, "mfu": 0.2}
    assert answer["measured"].keys() <= answer["prediction"].keys()
    assert answer["differences"] == pytest.approx(
        {"step_seconds": 0, "peak_bytes": 0.1, "tokens_per_second": 0, "mfu": 0}
    )
    assert answer["phases"] == {"forward": 0.125, "backward": 0.25, "optimizer": 0.125}
    assert answer["samples"] == [{"prompt": "def ", "text": "def first(self):\n    return 1"}]


def test_the_first_step_is_warm_up_and_not_measured(tmp_path: Path) -> None:
    state = state_of(finished_run(tmp_path / "run"))
    assert state.steps[0].step_seconds == 3.0
    assert state.measured is not None
    assert state.measured.step_seconds == 0.5
    assert state.phases == {"forward": 0.125, "backward": 0.25, "optimizer": 0.125}


def test_exposed_communication_by_axis_is_a_mean_of_recent_steps(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with Journal(run, 0) as journal:
        for step, seconds in enumerate((9.0, *[0.1, 0.3] * 10), 1):
            details = {"comm_seconds": {"dp_replicate": seconds, "tp": None, "world": 0.05}}
            journal.step(replace(step_metrics(step, loss=1.0), details=details))
    state = state_of(run)
    assert state.comm_seconds == pytest.approx({"dp_replicate": 0.2, "tp": None, "world": 0.05})
    assert state.as_dict()["comm_seconds"] == state.comm_seconds
    assert state_of(finished_run(tmp_path / "older")).comm_seconds == {}


def test_the_remaining_time_follows_from_recent_steps(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", steps=100)
    with Journal(run, 0) as journal:
        for step in range(1, 41):
            journal.step(step_metrics(step, loss=1.0, seconds=9.0 if step <= 20 else 0.5))
    assert state_of(run).remaining_seconds == pytest.approx(60 * 0.5)


def test_a_nan_loss_is_null_in_json(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with Journal(run, 0) as journal:
        journal.step(step_metrics(1, loss=math.nan))
        journal.event("evaluation", step=1, loss=math.inf, tokens=1)
    state = state_of(run)
    assert math.isnan(state.first_loss)
    answer = state.as_dict()
    assert (answer["first_loss"], answer["held_out_loss"]) == (None, None)


def test_fields_and_events_of_a_later_version_are_skipped(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.metrics.write_text(json.dumps(step_metrics(1, loss=2.0).as_dict() | {"novelty": [1]}) + "\n")
    run.events(0).write_text('{"kind": "novelty", "rank": 0, "time": 1.0, "step": 0, "data": {}, "more": 1}\n')
    assert [step.loss for step in state_of(run).steps] == [2.0]


def test_the_first_error_of_any_rank_is_the_failure(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    for rank in (1, 0):
        with Journal(run, rank) as journal:
            journal.event("error", type="RuntimeError", message=f"rank {rank} broke")
    state = state_of(run)
    assert state.status == "failed"
    assert state.failure is not None
    assert state.failure.rank == 1
    assert state.as_dict()["error"] == {"type": "RuntimeError", "message": "rank 1 broke", "rank": 1}


def test_a_run_that_stopped_on_request_is_not_done(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    start_ranks(run)
    with Journal(run, 0) as journal:
        journal.step(step_metrics(1, loss=2.0))
        journal.event("stop", step=1, reason="asked to stop")
        journal.event("done", step=1, steps=1, seconds=1.0)
    assert state_of(run).status == "stopped"


def test_a_run_whose_process_is_gone_has_vanished(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", world_size=1)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with Journal(run, 0) as journal:
        journal.event("start", host=platform.node(), pid=gone.pid)
        journal.step(step_metrics(1, loss=2.0))
    assert state_of(run).status == "vanished"


def test_a_process_of_another_host_is_assumed_to_be_alive(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", world_size=1)
    with Journal(run, 0) as journal:
        journal.event("start", host="elsewhere", pid=2**22 + 1)
    assert state_of(run).status == "starting"


def test_log_lines_are_returned_once_with_their_rank_and_without_control_codes(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.log(1).write_bytes(b"\x1b[31mred\x1b[0m alert\n  10%|#\r 100%|##########\n\nhalf a li")
    state = RunState(run)
    assert [str(line) for line in state.refresh()] == ["[rank 1] red alert", "[rank 1]  100%|##########"]
    with run.log(1).open("ab") as log:
        log.write(b"ne\n")
    assert [str(line) for line in state.refresh()] == ["[rank 1] half a line"]
    assert state.refresh() == []


def test_of_a_traceback_only_the_error_is_shown(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    state = RunState(run)
    run.log(0).write_text('before\nTraceback (most recent call last):\n  File "a.py", line 1\n')
    shown = state.refresh()
    with run.log(0).open("a") as file:
        file.write("    sink()\n    ^^^^\nValueError: too deep\n-- start 2 --\nafter\n")
    shown += state.refresh()
    assert [line.text for line in shown] == ["before", "ValueError: too deep", "after"]


def test_a_huge_log_is_read_from_near_its_end(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.log(0).write_bytes(b"x" * 99 + b"\n" + b"y" * 99 + b"\n" * 100_000 + b"the end\n")
    assert [line.text for line in RunState(run).refresh()] == ["the end"]


@pytest.mark.parametrize("damage", ["plan.json", "recipe.yaml"])
def test_a_run_with_a_missing_file_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    run = new_run(tmp_path / "run")
    (run.path / damage).unlink()
    with pytest.raises(UserError, match="A008"):
        RunState(run)


def test_the_partial_line_of_a_killed_rank_is_skipped(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.metrics.write_text('{"step": 1, "lo')
    with Journal(run, 0) as journal:
        journal.step(step_metrics(2, loss=2.0))
    state = RunState(run)
    state.refresh()
    assert [step.step for step in state.steps] == [2]


def test_details_of_some_plans_are_shown_as_text(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    start_ranks(run)
    details = {"bubble": {"measured": 0.31, "theoretical": 0.2}, "loss_scale": 65536.0}
    with Journal(run, 0) as journal:
        journal.step(replace(step_metrics(1, loss=2.0), details=details))
    state = RunState(run)
    state.refresh()
    assert dict(state.details) == {"bubble": "31% of the pipeline's time, 20% in theory", "loss_scale": "65536"}
    assert state.as_dict()["details"] == details
    assert state.steps[0].tokens_per_second == 2048.0
