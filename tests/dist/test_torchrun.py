"""A run whose ranks torchrun starts: the same command resumes it, and bad machines are reported."""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ranks import free_port, run_ranks
from trimaran.app import main
from trimaran.runs import Section
from trimaran.train import SupervisorLink

SETTINGS = ["model.shape={layers: 1, hidden: 32, heads: 4, kv_heads: 2, ffn: 64}", "data.seq_len=32", "train.steps=12",
            "train.global_batch=8", "train.sample.tokens=0", "train.evaluate.batches=0",
            "checkpoint.every=3"]  # fmt: skip


def command(path: Path, *settings: str) -> list[str]:
    return ["train", "--run-dir", str(path), *(word for each in [*SETTINGS, *settings] for word in ("--set", each))]


def train(path: Path, *settings: str) -> int:
    return main(command(path, *settings))


def train_on_two_machines(path: Path, *flags: str) -> int:
    """Train as the only rank of one of two machines, the second without the network interface it should use."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    if os.environ["RANK"] == "1":
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    return main([*command(path), *flags])


def train_and_die(path: Path) -> int:
    report_section = SupervisorLink.report_section

    def report_or_die(self: SupervisorLink, section: Section, step: int = 0) -> None:
        if os.environ["RANK"] == "1" and step == 8:
            while not any((path / "checkpoints").glob("step-*")):  # the step to resume is written in the background
                time.sleep(0.01)
            os._exit(9)
        report_section(self, section, step)

    SupervisorLink.report_section = report_or_die  # type: ignore[method-assign]
    return train(path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_same_command_resumes_its_run_and_another_recipe_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(AssertionError) as died:
        run_ranks(2, train_and_die, run)
    assert (run / "metrics.jsonl").exists(), died.value
    assert lines(run / "metrics.jsonl")[-1]["step"] < 12
    assert run_ranks(2, train, run, "train.lr=0.5") == [2, 2]
    assert run_ranks(2, train, run) == [0, 0]
    assert [each["step"] for each in lines(run / "metrics.jsonl")] == list(range(1, 13))
    assert [each["step"] for each in lines(run / "events" / "rank-0.jsonl") if each["kind"] == "ready"][-1] >= 3


def test_a_machine_that_cannot_run_the_recipe_ends_the_run_on_all_machines_and_is_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(2, train_on_two_machines, tmp_path / "run") == [2, 2]
    output = capfd.readouterr()
    assert output.err.count("H007: GLOO_SOCKET_IFNAME is nosuch0") == 1
    assert f"  where: node {platform.node()}\n" in output.err
    assert "--no-check" in output.err
    assert output.out == ""
    assert not (tmp_path / "run").exists()
    with pytest.raises(AssertionError, match="Unable to find address for: nosuch0"):
        run_ranks(2, train_on_two_machines, tmp_path / "run", "--no-check")


@pytest.mark.slow
def test_each_machine_under_torchrun_has_a_sidecar_that_ends_with_its_rank(tmp_path: Path) -> None:
    run = tmp_path / "run"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
             "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "-m", "trimaran",
             *command(run, "train.steps=150", "telemetry.sample_seconds=0.5")]  # fmt: skip
    agents = [subprocess.Popen(agent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    try:
        outputs = [each.communicate(timeout=120)[0] for each in agents]
    finally:
        for each in agents:
            each.kill()
    assert [each.returncode for each in agents] == [0, 0], outputs
    for node in range(2):
        samples = [each for each in lines(run / "telemetry" / f"node-{node}.jsonl") if each["ranks"]]
        assert {*samples[-1]["ranks"]} == {str(node)}
        assert all("loader_cpu" not in each["ranks"][str(node)] for each in samples), "the sidecar is not a loader"
    left = [
        each.info["cmdline"] for each in psutil.process_iter(["cmdline"]) if str(run) in (each.info["cmdline"] or [])
    ]
    assert left == []
