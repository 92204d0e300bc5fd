"""A real run with the autopilot: it finds a better plan by itself, and trains the same trajectory."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    "plan.precision=fp32",
)
BAD_MICRO_BATCH = ("plan.mesh.dp_replicate=2", "plan.micro_batch=1", "plan.grad_accum=16")
BAD_CUT = (
    "model.shape={layers: 6, hidden: 32, heads: 4, kv_heads: 2, head_dim: 8, ffn: 64}",
    "train.global_batch=8",
    "train.steps=120",
    "plan.mesh.pp=2",
    "plan.pipeline.stages=[1, 5]",
    "plan.micro_batch=1",
    "plan.grad_accum=8",
)
BAD_LOADER = (
    "train.global_batch=8",
    "train.steps=120",
    "plan.mesh.dp_replicate=2",
    "plan.micro_batch=4",
    "data.workers=1",
)
# Changes that the cost model also likes, but that are not what a test is about.
OTHERS = ("mesh", "micro_batch", "recompute", "compile", "loss", "pipeline.schedule")


def train(path: Path, mode: str, *settings: str, keep: Sequence[str] = (), **variables: str) -> RunDirectory:
    # A short run has a small budget, and a trial of it the same costs as that of a long one.
    section = f"autopilot={{mode: {mode}, budget: 0.2, keep: [{', '.join(keep)}]}}"
    sets = [part for each in (*SETTINGS, section, *settings) for part in ("--set", each)]
    command = [sys.executable, "-m", "trimaran", "train", "--run-dir", str(path), "--quiet", *sets]
    variables = environment(OMP_NUM_THREADS="1", **variables)
    done = subprocess.run(command, env=variables, timeout=600, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return RunDirectory(path)


def decisions_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.decisions.read_text().splitlines()]


@pytest.mark.slow
def test_micro_batches_of_one_row_grow_and_the_trajectory_stays(tmp_path: Path) -> None:
    tuned = train(tmp_path / "tuned", "act", *BAD_MICRO_BATCH)
    plain = train(tmp_path / "plain", "off", *BAD_MICRO_BATCH)
    decisions = decisions_of(tuned)
    kept = [each for each in decisions if each["outcome"] == "kept"]
    assert kept, decisions
    assert kept[0]["patch"]["plan.micro_batch"] > 1
    assert kept[0]["measured"]["gain"] > 0.1
    assert tuned.read_plan().micro_batch > 1
    assert tuned.read_plan().global_batch == plain.read_plan().global_batch
    assert_same_trajectory(trajectory_of(tuned), trajectory_of(plain), tolerance=1e-4)  # of 200 steps
    assert not plain.decisions.exists()


@pytest.mark.slow
def test_a_wrong_cut_of_a_pipeline_is_moved_by_measured_stage_times_and_the_trajectory_stays(tmp_path: Path) -> None:
    slow = {"TRIMARAN_TEST_PLUGIN": "tests.fault.slow_layers", "TRIMARAN_TEST_LAYER_SECONDS": "0.005"}
    tuned = train(tmp_path / "tuned", "act", *BAD_CUT, keep=OTHERS, **slow)
    plain = train(tmp_path / "plain", "off", *BAD_CUT)
    decisions = decisions_of(tuned)
    kept = [each for each in decisions if each["outcome"] == "kept"]
    assert kept, decisions
    assert kept[0]["finding"] == "F011"
    assert kept[0]["expected"]["gain"] > 0.1 < kept[0]["measured"]["gain"]
    assert kept[0]["expected"]["uncertainty"] > 0
    stages = tuned.read_plan().pipeline.stages
    assert min(stages) >= 2, stages
    assert_same_trajectory(trajectory_of(tuned), trajectory_of(plain), tolerance=1e-4)


@pytest.mark.slow
def test_too_few_loader_processes_become_more_and_the_trajectory_stays(tmp_path: Path) -> None:
    slow = {"TRIMARAN_TEST_PLUGIN": "tests.fault.slow_loader", "TRIMARAN_TEST_LOAD_SECONDS": "0.08"}
    tuned = train(tmp_path / "tuned", "act", *BAD_LOADER, keep=[*OTHERS, "comm", "sharding"], **slow)
    plain = train(tmp_path / "plain", "off", *BAD_LOADER)
    decisions = decisions_of(tuned)
    kept = [each for each in decisions if each["outcome"] == "kept"]
    assert kept, decisions
    assert kept[0]["finding"] == "F001"
    assert kept[0]["measured"]["gain"] > 0.1
    workers = tuned.read_recipe().data.workers
    assert isinstance(workers, int)
    assert workers > 1
    assert_same_trajectory(trajectory_of(tuned), trajectory_of(plain), tolerance=1e-4)
