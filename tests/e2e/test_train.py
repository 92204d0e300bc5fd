"""`trimaran train` with real supervisor, ranks, files and signals."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.cases import slow
from tests.environment import environment
from tests.prometheus_server import free_port
from trimaran.app import main

TINY = [
    "--set", "model.shape={layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 64}",
    "--set", "data.seq_len=32",
    "--set", "train.global_batch=8",
    "--set", "cluster=2xcpu",
]  # fmt: skip


def start(*arguments: str, cwd: Path, **variables: str) -> forked.Forked:
    return trimaran("train", *TINY, *arguments, cwd=cwd, **variables)


def trimaran(command: str, *arguments: str, cwd: Path, **variables: str) -> forked.Forked:
    return forked.start("trimaran", command, "--warm", *arguments, cwd=cwd, env=environment(**variables))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def processes_of(run: Path) -> list[psutil.Process]:
    """Return supervisor, fork server, ranks and sidecar: processes with the run directory open, but not `train`."""
    commands = [(each, each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
    typed = ("--run-dir", "tests.fork_source")  # `train`, and what it is forked from
    return [
        each
        for each, command in commands
        if not any(word in command for word in typed) and str(run) in open_paths(each.pid)
    ]


def open_paths(pid: int) -> set[str]:
    """Return what the process `pid` has open; nothing if it is gone."""
    found = set()
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(each.readlink()))
    return found


def test_a_recipe_becomes_a_trained_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("train.steps=12", "train.evaluate.every=5", "train.sample.tokens=40")
    process = start("--json", *(word for each in settings for word in ("--set", each)), cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    answer = json.loads(out)
    run = tmp_path / "runs" / "stdlib-tiny"
    assert tmp_path / answer["run_dir"] == run
    assert answer["final_loss"] < answer["first_loss"]
    assert (answer["exit"], answer["attempts"], answer["restarts"]) == (0, 1, 0)
    assert {each["action"] for each in answer["incidents"]} <= {"continued"}  # a busy machine makes ranks slow

    metrics = lines(run / "metrics.jsonl")
    assert [each["step"] for each in metrics] == list(range(1, 13))
    for each in metrics:
        assert sum(each["phases"].values()) == pytest.approx(each["step_seconds"], abs=5e-6)  # microseconds are written
        assert each["tokens"] == 8 * 32
        assert each["samples"] == 8
        assert each["tokens_per_second"] == pytest.approx(each["tokens"] / each["step_seconds"], rel=1e-3)
        assert each["peak_bytes"] > 0
        assert each["mfu"] == 0  # the peak of a CPU is not known
    assert set(metrics[0]["phases"]) == {"data", "forward", "backward", "comm", "optimizer", "checkpoint"}

    events = [each for each in lines(run / "events" / "rank-0.jsonl") if each["kind"] != "loss_bound"]
    assert [each["kind"] for each in events] == [
        "start",
        "ready",
        "started",
        "evaluation",
        "evaluation",
        "checkpoint",
        "saved",
        "trained",
        "evaluation",
        "sample",
        "done",
    ]
    assert [*events[1]["data"]["phases"]] == ["join", "network", "data", "optimizer", "keep"]
    assert 0 < sum(events[1]["data"]["phases"].values()) <= events[1]["data"]["seconds"]
    assert events[2]["data"]["seconds"] == pytest.approx(metrics[0]["step_seconds"])
    assert [each["step"] for each in events if each["kind"] == "evaluation"] == [5, 10, 12]
    (sample,) = [each["data"] for each in events if each["kind"] == "sample"]
    assert sample["text"].startswith(sample["prompt"])
    assert (run / "events" / "rank-1.jsonl").exists()
    assert {"rank-0.log", "rank-1.log"} <= {each.name for each in (run / "logs").iterdir()}
    plan = json.loads((run / "plan.json").read_text())
    assert plan["plan"]["mesh"]["dp_replicate"] == 2
    assert plan["prediction"]["step_seconds"] > 0
    assert (run / "model" / "model.safetensors").exists()

    assert main(["generate", str(run), "--prompt", "class ", "--tokens", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"].startswith("class ")


def test_ctrl_c_stops_all_ranks_at_the_same_step_and_resume_continues(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["--set", "train.steps=100000", "--set", "train.sample.tokens=0"]
    process = start("--run-dir", str(run), *settings, cwd=tmp_path)
    wait_for(lambda: len(lines(run / "metrics.jsonl")) >= 3)
    assert len(processes_of(run)) == 5  # supervisor, fork server, ranks, sidecar
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "Traceback" not in out + err
    assert "using the warm fork server" in out, "or else the whole suite starts an interpreter for every run"
    assert f"trimaran resume {run}" in out
    (stop,) = {
        each["step"]
        for rank in (0, 1)
        for each in lines(run / "events" / f"rank-{rank}.jsonl")
        if each["kind"] == "stop"
    }
    assert lines(run / "metrics.jsonl")[-1]["step"] == stop
    assert (run / "checkpoints" / f"step-{stop:08d}" / "manifest.json").exists()
    assert processes_of(run) == []

    again = trimaran("resume", str(run), "--set", f"train.steps={stop + 5}", "--json", cwd=tmp_path)
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    answer = json.loads(out)
    assert (answer["status"], answer["steps"], answer["attempts"], answer["restarts"]) == ("done", stop + 5, 2, 0)
    assert [each["step"] for each in lines(run / "metrics.jsonl")] == list(range(1, stop + 6))


def test_a_second_ctrl_c_kills_everything_at_once(tmp_path: Path) -> None:
    long_steps = {"TRIMARAN_TEST_PLUGIN": "tests.fault.plugin", "TRIMARAN_TEST_PAUSE": "3"}  # a stop waits for one
    process = start("--run-dir", str(tmp_path / "run"), "--set", "train.steps=100000", cwd=tmp_path, **long_steps)
    run = tmp_path / "run"
    wait_for(lambda: lines(run / "metrics.jsonl"))
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # two pending signals of a kind are delivered once
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130, "a first one alone ends it with 75, after a checkpoint"
    wait_for(lambda: not processes_of(run), 20)


def test_a_killed_rank_is_replaced_and_the_incident_is_shown(tmp_path: Path) -> None:
    settings = ["--set", "train.steps=150", "--set", "train.sample.tokens=0", "--set", "checkpoint.memory=1"]
    process = start("--run-dir", str(tmp_path / "run"), *settings, cwd=tmp_path)
    run = tmp_path / "run"
    wait_for(lambda: lines(run / "metrics.jsonl"))
    os.kill(lines(run / "events" / "rank-1.jsonl")[0]["data"]["pid"], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "rank 1 was killed by SIGKILL" in out
    assert "restarted from the newest state" in out
    assert re.search(r"\d incidents?, 1 restart, \d lost step", out)
    assert [each["step"] for each in lines(run / "metrics.jsonl")] == list(range(1, 151))


@pytest.mark.parametrize("victim", ["trimaran train", slow("the supervisor")])
def test_no_rank_outlives_its_parent(tmp_path: Path, victim: str) -> None:
    process = start("--run-dir", str(tmp_path / "run"), "--set", "train.steps=100000", cwd=tmp_path)
    run = tmp_path / "run"
    wait_for(lambda: lines(run / "metrics.jsonl"))
    supervisor = next(each for each in processes_of(run) if each.ppid() == process.pid)
    (process if victim == "trimaran train" else supervisor).kill()
    wait_for(lambda: not processes_of(run), 15 if victim == "trimaran train" else 5)
    out, _ = process.communicate(timeout=15)
    if victim == "trimaran train":  # the run stops with a checkpoint
        assert any((run / "checkpoints").glob("step-*/manifest.json"))
        assert lines(run / "attempts.jsonl")[-1]["over"] == 75
    else:
        assert process.returncode == 1
        assert "the supervisor was killed by SIGKILL" in out


@pytest.mark.parametrize("launcher", ["its environment", slow("torchrun")])
def test_an_outside_torchrun_may_start_the_ranks(launcher: str, tmp_path: Path) -> None:
    settings = ("train.steps=3", "train.sample.tokens=0", "cluster=auto")
    command = ["train", *TINY, "--run-dir", "run", *(word for each in settings for word in ("--set", each))]
    if launcher == "torchrun":
        words = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trimaran", *command)
        ranks = [forked.start(*words, cwd=tmp_path)]
    else:
        given = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        own = [environment(**given, RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0") for rank in "01"]
        ranks = [forked.start("trimaran", *command, cwd=tmp_path, env=each) for each in own]
    for each in ranks:
        _, err = each.communicate(timeout=120)
        assert each.returncode == 0, err
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 3
    assert lines(tmp_path / "run" / "events" / "rank-1.jsonl")[-1]["kind"] == "done"
