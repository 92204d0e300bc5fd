"""`trimaran drill` on a live run of two ranks: what it refuses, a killed rank, and Ctrl-C. More: `tests/chaos`."""

import json
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault.harness import ROOT, Supervised, lines, wait_for
from tests.runs import new_run
from trimaran.app.main import main
from trimaran.core import UserError
from trimaran.drill.find_processes import find_processes
from trimaran.launch.collect_reports import process_state
from trimaran.run import Journal, RunDirectory
from trimaran.run.attempts import AttemptLog
from trimaran.run.lease import take_lease


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the code of the error of `trimaran drill`, which must be a user's mistake."""
    assert main(["drill", *arguments]) == 2
    return capsys.readouterr().err[:4]


def recorded_run(path: Path, *, host: str) -> RunDirectory:
    """Return a run of two ranks whose files say that they run on `host`."""
    run = new_run(path)
    AttemptLog(run).begin(world_size=2)
    for rank in range(2):
        with Journal(run, rank) as journal:
            journal.event("start", world_size=2, host=host, pid=2**22 + rank)
    return run


def test_a_live_run_is_drilled_only_with_yes_and_left_alone_after_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("train.steps=1000000", "checkpoint.memory=1")
    with Supervised.start(tmp_path / "run", *settings, pause=0.02) as supervised:
        path = str(supervised.run.path)
        assert refusal(capsys, path, "--kill=1") == "S032"
        assert refusal(capsys, path, "--yes") == "A001"  # no fault is named
        assert refusal(capsys, path, "--kill=1", "--yes", "--set=train.steps=9") == "A001"
        supervised.wait_for_step(1)
        assert refusal(capsys, path, "--kill=2", "--yes") == "A001"  # the ranks are 0 and 1
        assert refusal(capsys, path, "--damage-checkpoint", "--yes") == "S033"
        assert refusal(capsys, path, "--kill-loader=0", "--yes") == "S033"
        assert supervised.attempts() == 1
        assert main(["drill", path, "--kill=1", "--yes", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        (drill,) = answer["drills"]
        assert (drill["cause"], drill["suspects"], drill["named"]) == ("crash", [1], True)
        assert drill["lost_steps"] <= 1
        assert drill["detected_seconds"] <= drill["recovered_seconds"]
        assert lines(supervised.run.path / "drills.jsonl") == [drill]

        command = [sys.executable, "-m", "trimaran", "drill", path, "--stop=0", "--yes"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        pid = supervised.pid(0)
        wait_for(lambda: process_state(pid) == "T", 30)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process_state(pid) not in ("T", "")
        supervised.wait_for_step(supervised.step() + 3)
        assert supervised.attempts() == 2  # the stopped rank was continued before the run called it hung
    assert refusal(capsys, path, "--kill=1", "--yes") == "S030"


def test_a_rank_that_the_plan_does_not_have_is_refused_before_a_run_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "--set=cluster=2xcpu", "--slow=2=2x", f"--run-dir={tmp_path / 'run'}") == "A001"
    assert refusal(capsys, "--fill-disk", f"--run-dir={tmp_path / 'run'}", "--set=no.field=1") == "R011"
    assert not (tmp_path / "run").exists()


def test_ranks_on_another_machine_are_refused_with_its_name(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", host="node-7")
    with pytest.raises(UserError, match="ssh node-7 trimaran drill") as caught:
        find_processes(run)
    assert caught.value.code == "S031"


def test_a_pid_that_belongs_to_another_process_is_no_rank(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", host=platform.node())
    with take_lease(run):
        assert find_processes(run) is None  # a supervisor is alive, and so starts its ranks again
    with pytest.raises(UserError, match="S030"):
        find_processes(run)
