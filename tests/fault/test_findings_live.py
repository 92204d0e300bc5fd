"""`trimaran train` prints each finding once while the run continues, with the command that fixes it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.diagnosed_runs import SMALL
from tests.fault.harness import ROOT, wait_for
from trimaran.core import EXIT_AGAIN
from trimaran.runs import RunDirectory, last_step

pytestmark = pytest.mark.chaos

SLOW = {"TRIMARAN_TEST_PLUGIN": "tests.fault.slow_loader", "TRIMARAN_TEST_LOAD_SECONDS": "0.1"}
TINY = "model.shape={layers: 1, hidden: 32, heads: 2, kv_heads: 2, ffn: 64}"  # much less compute than the loader takes
SECONDS = 32.0  # time for three polls of the doctor


def train_and_read_output(folder: Path, *settings: str, **extra: str) -> list[str]:
    """Return the output of `trimaran train` into a pipe, until it is stopped.

    Nobody looks at the machine: what else runs there may be worth a finding, and its cores may be too few for a patch.
    """
    asked = (*SMALL, "cluster=1xcpu", "train.steps=100000", "telemetry.sample_seconds=0", *settings)
    command = [sys.executable, "-m", "trimaran", "train", "--run-dir", str(folder / "run")]
    command += [word for each in asked for word in ("--set", each)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | extra
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, **pipes) as process:
        try:
            wait_for(lambda: last_step(RunDirectory(folder / "run")))
            time.sleep(SECONDS)
            process.terminate()
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == EXIT_AGAIN, output
    return output.splitlines()


def test_a_slow_loader_is_reported_once_while_the_run_continues(tmp_path: Path) -> None:
    lines = train_and_read_output(tmp_path, TINY, "data.seq_len=16", "train.global_batch=4", **SLOW)
    (index,) = (number for number, line in enumerate(lines) if line.startswith("! F001 the trainer waits "))
    fix = rf"  fix: trimaran train {re.escape(str(tmp_path))}/run/recipe.yaml --set data.workers=\d+"
    assert re.fullmatch(fix, lines[index + 1])
    assert sum(line.startswith("step ") for line in lines[index:]) > 1, "it is printed while the run trains"
    assert re.fullmatch(rf"\d findings? \(.*F001.*\); details: trimaran doctor {tmp_path}/run", lines[-1])


def test_a_healthy_run_prints_no_findings(tmp_path: Path) -> None:
    lines = train_and_read_output(tmp_path)
    assert sum(line.startswith("step ") for line in lines) > 3
    assert not [line for line in lines if re.match(r"[✗!i] F\d+|found |the doctor", line)]
