"""`trimaran train` for real: agent, ranks, files, signals. Each test starts interpreters, so there are few."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

TINY = [
    "--set", "model.shape={layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 64}",
    "--set", "data.seq_len=32",
    "--set", "train.global_batch=8",
    "--set", "cluster=2xcpu",
]  # fmt: skip


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trimaran", "train", *TINY, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def ranks_of(run: Path) -> list[psutil.Process]:
    """The agent and the ranks: every process with the run directory on its command line, but not `trimaran train`."""
    commands = [(each, each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
    return [each for each, command in commands if str(run) in command and "--run-dir" not in command]


def test_a_recipe_becomes_a_trained_model(tmp_path: Path) -> None:
    process = start("--json", "--set", "train.steps=12", "--set", "train.evaluate.every=5", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    answer = json.loads(out)
    run = tmp_path / "runs" / "stdlib-tiny"
    assert tmp_path / answer["run_dir"] == run
    assert answer["final_loss"] < answer["first_loss"]

    metrics = lines(run / "metrics.jsonl")
    assert [each["step"] for each in metrics] == list(range(1, 13))
    for each in metrics:
        assert sum(each["phases"].values()) == pytest.approx(each["step_seconds"], rel=1e-6)
        assert each["tokens"] == 8 * 32
        assert each["samples"] == 8
        assert each["tokens_per_second"] == pytest.approx(each["tokens"] / each["step_seconds"])
        assert each["peak_bytes"] > 0
        assert 0 < each["mfu"] < 1
    assert set(metrics[0]["phases"]) == {"data", "forward", "backward", "comm", "optimizer", "checkpoint"}

    events = lines(run / "events" / "rank-0.jsonl")
    assert [each["kind"] for each in events] == [
        "start",
        "ready",
        "evaluation",
        "evaluation",
        "saved",
        "evaluation",
        "sample",
        "done",
    ]
    assert [each["step"] for each in events if each["kind"] == "evaluation"] == [5, 10, 12]
    (sample,) = [each["data"] for each in events if each["kind"] == "sample"]
    assert sample["text"].startswith(sample["prompt"])
    assert (run / "events" / "rank-1.jsonl").exists()
    assert {"rank-0.log", "rank-1.log"} <= {each.name for each in (run / "logs").iterdir()}
    plan = json.loads((run / "plan.json").read_text())
    assert plan["plan"]["mesh"]["dp_replicate"] == 2
    assert plan["prediction"]["step_seconds"] > 0
    assert (run / "model" / "model.safetensors").exists()

    # What was trained can be asked to write.
    told = subprocess.run(
        [sys.executable, "-m", "trimaran", "generate", str(run), "--prompt", "class ", "--tokens", "5", "--json"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["text"].startswith("class ")


def test_one_ctrl_c_stops_all_ranks_at_the_same_step_and_keeps_the_model(tmp_path: Path) -> None:
    process = start(
        "--run-dir",
        str(tmp_path / "run"),
        "--set",
        "train.steps=100000",
        "--set",
        "train.sample.tokens=4",
        cwd=tmp_path,
    )
    run = tmp_path / "run"
    wait_for(lambda: len(lines(run / "metrics.jsonl")) >= 3)
    assert len(ranks_of(run)) == 3
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in out + err
    stops = [
        [each["step"] for each in lines(run / "events" / f"rank-{rank}.jsonl") if each["kind"] == "stop"]
        for rank in (0, 1)
    ]
    assert stops[0] == stops[1]
    assert len(stops[0]) == 1
    assert lines(run / "metrics.jsonl")[-1]["step"] == stops[0][0]
    assert (run / "model" / "model.safetensors").exists()
    assert ranks_of(run) == []


def test_two_ctrl_c_end_everything_at_once(tmp_path: Path) -> None:
    process = start("--run-dir", str(tmp_path / "run"), "--set", "train.steps=100000", cwd=tmp_path)
    run = tmp_path / "run"
    wait_for(lambda: lines(run / "metrics.jsonl"))
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - began < 3
    wait_for(lambda: not ranks_of(run), 3)


def test_a_killed_rank_is_a_fault_that_names_its_log(tmp_path: Path) -> None:
    process = start("--run-dir", str(tmp_path / "run"), "--set", "train.steps=100000", cwd=tmp_path)
    run = tmp_path / "run"
    wait_for(lambda: lines(run / "metrics.jsonl"))
    (victim,) = [each for each in ranks_of(run) if each.environ().get("RANK") == "1" and each.ppid() != process.pid]
    victim.kill()
    out, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, 2, 75, 93, 130)
    assert "rank 1 died without a word" in out
    assert "logs/rank-1.log" in out
    wait_for(lambda: not ranks_of(run), 5)


@pytest.mark.parametrize("victim", ["trimaran train", "the agent"])
def test_no_rank_outlives_who_started_it(tmp_path: Path, victim: str) -> None:
    process = start("--run-dir", str(tmp_path / "run"), "--set", "train.steps=100000", cwd=tmp_path)
    run = tmp_path / "run"
    wait_for(lambda: lines(run / "metrics.jsonl"))
    agent = next(each for each in ranks_of(run) if each.ppid() == process.pid)
    (process if victim == "trimaran train" else agent).kill()
    wait_for(lambda: not ranks_of(run), 15)
    process.communicate(timeout=15)
    assert (run / "model" / "model.safetensors").exists(), "a rank that is asked to stop keeps its weights"


def test_an_outside_torchrun_may_start_the_ranks(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "trimaran",
        "train",
    ]
    settings = [
        *TINY,
        "--set",
        "train.steps=3",
        "--set",
        "train.sample.tokens=0",
        "--set",
        "cluster=auto",
        "--run-dir",
        "run",
    ]
    done = subprocess.run([*command, *settings], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 3
    assert lines(tmp_path / "run" / "events" / "rank-1.jsonl")[-1]["kind"] == "done"
