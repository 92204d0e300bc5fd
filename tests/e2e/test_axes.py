"""`trimaran train` with tensor, pipeline and data parallelism."""

import json
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.e2e.test_train import lines, processes_of, start, wait_for
from trimaran.checkpoint import step_path
from trimaran.core import EXIT_AGAIN

FOREVER = ["--set", "train.steps=100000", "--set", "train.sample.tokens=4"]


def events(run: Path, rank: int, kind: str) -> list[dict]:
    return [each for each in lines(run / "events" / f"rank-{rank}.jsonl") if each["kind"] == kind]


@pytest.mark.slow  # tests/dist/test_matrix.py covers the numbers faster
def test_tensor_and_pipeline_parallel_train_and_save_the_same_model_as_one_process(tmp_path: Path) -> None:
    short = ["--set", "train.steps=4", "--set", "train.evaluate.every=2", "--set", "train.sample.tokens=4"]
    split = ["--set", "cluster=4xcpu", "--set", "plan={mesh: {tp: 2, pp: 2}, grad_accum: 4}"]
    runs = {"split": tmp_path / "split", "single": tmp_path / "single"}
    processes = {
        "split": start("--json", "--run-dir", str(runs["split"]), *short, *split, cwd=tmp_path),
        "single": start("--json", "--run-dir", str(runs["single"]), *short, "--set", "cluster=1xcpu", cwd=tmp_path),
    }
    answers = {}
    for name, process in processes.items():
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, err
        answers[name] = json.loads(out)
    assert answers["split"]["final_loss"] == pytest.approx(answers["single"]["final_loss"], rel=1e-5)

    metrics = {name: lines(run / "metrics.jsonl") for name, run in runs.items()}
    for ours, plain in zip(metrics["split"], metrics["single"], strict=True):
        for number in ("loss", "grad_norm", "lr", "tokens", "samples"):
            assert ours[number] == pytest.approx(plain[number], rel=1e-5)
        assert 0 < ours["bubble"]["measured"] < 1
        assert ours["bubble"]["theoretical"] == pytest.approx(1 / 5)
        assert sum(ours["phases"].values()) == pytest.approx(ours["step_seconds"], rel=1e-6)
    for name in ("evaluation", "sample"):
        found = [events(run, 0, name) for run in runs.values()]
        assert [each["step"] for each in found[0]] == [each["step"] for each in found[1]] != []
    held_out = [[each["data"]["loss"] for each in events(run, 0, "evaluation")] for run in runs.values()]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)
    for rank in range(4):
        assert len(events(runs["split"], rank, "done")) == 1
        assert (runs["split"] / "logs" / f"rank-{rank}.log").read_text() == ""  # no unexpected output

    ours, plain = (load_file(run / "model" / "model.safetensors") for run in runs.values())
    assert ours.keys() == plain.keys()
    for name, weight in ours.items():
        assert weight == pytest.approx(plain[name], rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_a_pipeline_stops_at_one_step_on_all_ranks_and_saves_its_state(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pipeline = ["--set", "plan={mesh: {pp: 2}, pipeline: {schedule: zero-bubble, stages: [1, 1, 1, 1]}, grad_accum: 4}"]
    deep = ["--set", "model.shape.layers=4"]
    process = start("--run-dir", str(run), *FOREVER, *pipeline, *deep, cwd=tmp_path)
    wait_for(lambda: len(lines(run / "metrics.jsonl")) >= 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_AGAIN, err
    assert "Traceback" not in out + err
    stops = [[each["step"] for each in events(run, rank, "stop")] for rank in (0, 1)]
    assert stops == [[lines(run / "metrics.jsonl")[-1]["step"]]] * 2
    index = json.loads((step_path(run / "checkpoints", stops[0][0]) / "index.json").read_text())
    assert any(".3." in key for key in index["tensors"])
    assert processes_of(run) == []


@pytest.mark.slow
def test_replicas_with_local_steps_stop_only_at_a_synchronization(tmp_path: Path) -> None:
    run = tmp_path / "run"
    alone = ["--set", "plan={mesh: {dp_replicate: 2}, comm: {local_steps: 40}}"]
    process = start("--run-dir", str(run), *FOREVER, *alone, cwd=tmp_path)
    wait_for(lambda: len(lines(run / "metrics.jsonl")) >= 3)
    (run / "stop").touch()
    _, err = process.communicate(timeout=120)
    assert process.returncode == EXIT_AGAIN, err
    (stop,) = events(run, 0, "stop")
    assert stop["step"] % 40 == 0
