"""`trimaran drill` on a live run of two ranks: what it refuses, a killed rank, and Ctrl-C. More: `tests/chaos`."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fault.harness import SECONDS, Supervised, lines, start_module, wait_for
from trimaran.app import main
from trimaran.launch import process_state


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the code of the error of `trimaran drill`, which must be a user's mistake."""
    assert main(["drill", *arguments]) == 2
    return capsys.readouterr().err[:4]


def test_a_live_run_is_drilled_only_with_yes_and_left_alone_after_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("train.steps=1000000", "checkpoint.memory=1", "faults.hang_seconds=600")
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
        assert drill["lost_steps"] <= 2
        assert drill["detected_seconds"] <= drill["recovered_seconds"]
        assert lines(supervised.run.path / "drills.jsonl") == [drill]

        process = start_module("trimaran", "drill", path, "--stop=0", "--yes", output=subprocess.DEVNULL)
        pid = supervised.pid(0)
        wait_for(lambda: process_state(pid) == "T")
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert process_state(pid) not in ("T", "")
        supervised.wait_for_step(supervised.step() + 3)
        assert supervised.attempts() == 2  # the stopped rank was continued
    assert refusal(capsys, path, "--kill=1", "--yes") == "S030"


def test_a_rank_that_the_plan_does_not_have_is_refused_before_a_run_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "--set=cluster=2xcpu", "--slow=2=2x", f"--run-dir={tmp_path / 'run'}") == "A001"
    assert refusal(capsys, "--fill-disk", f"--run-dir={tmp_path / 'run'}", "--set=no.field=1") == "R011"
    assert not (tmp_path / "run").exists()
