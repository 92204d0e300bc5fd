"""A real run with the autopilot: it finds a better plan by itself, and trains the same trajectory."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.environment import environment
from tests.parity import assert_same_trajectory, trajectory_of
from trimaran.runs import RunDirectory, change_answers, read_incidents

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
    process = start(path, mode, *settings, keep=keep, **variables)
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, out[-3000:] + errors[-3000:]
    return RunDirectory(path)


def start(path: Path, mode: str, *settings: str, keep: Sequence[str] = (), **variables: str) -> forked.Forked:
    # A short run has a small budget, and a trial of it the same costs as that of a long one.
    section = f"autopilot={{mode: {mode}, budget: 0.2, keep: [{', '.join(keep)}]}}"
    sets = [part for each in (*SETTINGS, section, *settings) for part in ("--set", each)]
    words = ("train", "--warm", "--run-dir", str(path), "--quiet", *sets)
    return forked.start("trimaran", *words, env=environment(**variables))


def decisions_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.decisions.read_text().splitlines()] if run.decisions.exists() else []


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


@pytest.mark.slow
def test_a_trial_of_compilation_is_judged_and_its_first_step_is_no_hang(tmp_path: Path) -> None:
    """The first compiled step takes longer than the hang limit of a step. The run is long, or no trial would pay."""
    settings = ("plan.mesh.dp_replicate=2", "plan.micro_batch=4", "plan.compile=false", "faults.hang_seconds=1",
                "train.global_batch=8", "train.steps=1000000")  # fmt: skip
    keep = ["mesh", "micro_batch", "recompute", "loss", "comm", "sharding", "cuda_graphs", "data.workers"]
    process = start(tmp_path / "run", "act", *settings, keep=keep)
    try:
        run, deadline = RunDirectory(tmp_path / "run"), time.monotonic() + 400
        while not (ended := [each for each in decisions_of(run) if each["outcome"] != "trying"]):
            assert process.poll() is None, process.communicate()[1][-3000:]
            assert time.monotonic() < deadline, decisions_of(run)
            time.sleep(1.0)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert ended[0]["patch"] == {"plan.compile": True}
    assert ended[0]["outcome"] in ("kept", "rolled-back")
    assert ended[0]["measured"]["pause_seconds"] > 0
    answers = [event["data"] for event in change_answers(run)]
    assert (answers[0]["patch"], answers[0]["status"]) == ({"plan.compile": True}, "applied")
    assert run.read_plan().compile == (ended[0]["outcome"] == "kept")
    assert [each.cause for each in read_incidents(run) if each.cause == "hang"] == []
