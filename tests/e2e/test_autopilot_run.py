"""A real run with the autopilot: it finds a better plan by itself, and trains the same trajectory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import environment
from tests.parity import assert_same_trajectory, trajectory_of
from trimaran.run import RunDirectory

SETTINGS = (
    "cluster=2xcpu",
    "model.shape={layers: 4, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, ffn: 128}",
    "data.seq_len=64",
    "train.global_batch=32",
    "train.steps=200",
    "train.sample.tokens=0",
    "checkpoint.every=off",
    "plan.mesh.dp_replicate=2",
    "plan.precision=fp32",
)
BAD_START = ("plan.micro_batch=1", "plan.grad_accum=16")


def train(path: Path, mode: str, *settings: str) -> RunDirectory:
    # A short run has a small budget, and a trial of it the same costs as that of a long one.
    section = f"autopilot={{mode: {mode}, budget: 0.2}}"
    sets = [part for each in (*SETTINGS, section, *settings) for part in ("--set", each)]
    command = [sys.executable, "-m", "trimaran", "train", "--run-dir", str(path), "--quiet", *sets]
    done = subprocess.run(
        command, env=environment(OMP_NUM_THREADS="1"), timeout=600, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return RunDirectory(path)


@pytest.mark.slow
def test_micro_batches_of_one_row_grow_and_the_trajectory_stays(tmp_path: Path) -> None:
    tuned, plain = train(tmp_path / "tuned", "act", *BAD_START), train(tmp_path / "plain", "off", *BAD_START)
    decisions = [json.loads(line) for line in (tuned.path / "decisions.jsonl").read_text().splitlines()]
    kept = [each for each in decisions if each["outcome"] == "kept"]
    assert kept, decisions
    assert kept[0]["patch"]["plan.micro_batch"] > 1
    assert kept[0]["measured"]["gain"] > 0.1
    assert tuned.read_plan().micro_batch > 1
    assert tuned.read_plan().global_batch == plain.read_plan().global_batch
    assert_same_trajectory(trajectory_of(tuned), trajectory_of(plain), tolerance=1e-4)  # of 200 steps
    assert not (plain.path / "decisions.jsonl").exists()
