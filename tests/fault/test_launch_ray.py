"""Runs on a real Ray cluster: a node is removed and one is added, a job is stopped and resumed, a local cluster."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.chaos.nodes import make_run
from tests.fault.harness import TINY, lines, wait_for
from tests.parity import TOLERANCE
from tests.ray_cluster import ROOT, RayCluster
from trimaran.runs import RunDirectory, read_incidents

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'trimaran[ray]'"),
]
PAUSE = {"TRIMARAN_TEST_PLUGIN": "tests.fault.plugin", "TRIMARAN_TEST_PAUSE": "0.1", "OMP_NUM_THREADS": "1"}
ADDRESSES = [f"127.0.1.{number}" for number in range(1, 4)]
SECRET = "canary-5f0c1d"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Three nodes with one CPU each, the head one of them."""
    with RayCluster(tmp_path_factory.mktemp("cluster"), nodes=3) as cluster:
        yield cluster


class Launcher:
    """The commands `trimaran launch` and `trimaran jobs`, with their own record of jobs."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.run = RunDirectory(folder / "run")
        ours = {"XDG_STATE_HOME": str(folder / "state"), "TRIMARAN_TARGETS": str(folder / "targets.yaml")}
        self.environment = {**environment, **ours, "HF_TOKEN": SECRET}

    def call(self, *words: str, code: int = 0) -> dict[str, Any]:
        """Return the answer of a command with `--json`."""
        command = [str(Path(sys.executable).with_name("trimaran")), *words, "--json"]
        done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    def launch(self, site: Mapping[str, Any], *settings: str) -> str:
        words = [f"--set={each}" for each in (*TINY, *settings)]
        words += [f"--site={name}={json.dumps(value)}" for name, value in {"python": sys.executable, **site}.items()]
        return self.call("launch", "--on", "ray", "--run-dir", str(self.run.path), *words)["id"]

    def state(self, job: str) -> dict[str, Any]:
        return self.call("jobs", job)["state"]

    def wait_for_end(self, job: str, seconds: float = 180.0) -> dict[str, Any]:
        return wait_for(lambda: (state := self.state(job))["state"] not in ("queued", "running") and state, seconds)

    def step(self) -> int:
        found = lines(self.run.metrics)
        return found[-1]["step"] if found else 0

    def sizes(self) -> list[int]:
        """Return the number of ranks of each attempt."""
        return [each["world_size"] for each in lines(self.run.attempts) if "world_size" in each]


def undisturbed(path: Path, *settings: str) -> RunDirectory:
    """Return a run of the same recipe under one supervisor on this machine, without Ray."""
    run = make_run(path, *settings)
    command = [sys.executable, "-m", "trimaran.launch", str(path), "--no-check"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return run


def weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    (file,) = run.model.glob("*.safetensors")
    return load_file(file)


def assert_bit_equal(run: RunDirectory, other: RunDirectory) -> None:
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def gauges(cluster: RayCluster) -> dict[str, float]:
    """Return the values of our metrics in what the cluster's nodes export to Prometheus."""
    request = urllib.request.Request(f"{cluster.address}/api/prometheus/sd")
    token = Path(cluster.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        targets = [target for group in json.load(answer) for target in group["targets"]]
    found = {}
    for target in targets:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found |= {name: float(value) for name, value in re.findall(r"^ray_(trimaran_\w+)\{.*\} (\S+)$", text, re.M)}
    return found


def test_a_removed_node_shrinks_the_run_and_a_new_one_grows_it(cluster: RayCluster, tmp_path: Path) -> None:
    settings = ("cluster=3x1xcpu", "faults.ranks=[2, 3]", "train.global_batch=6", "train.steps=500")
    launcher = Launcher(tmp_path, cluster.environment)
    site = {"address": cluster.address, "node_addresses": ADDRESSES, "environment": PAUSE}
    job = launcher.launch(site, *settings, "checkpoint.every=20")
    wait_for(lambda: launcher.step() >= 10, 120)
    assert launcher.state(job)["state"] == "running"
    cluster.remove("127.0.0.4")
    wait_for(lambda: launcher.sizes() == [3, 2], 90)
    before = launcher.step()
    wait_for(lambda: launcher.step() > before, 60)
    cluster.add()
    wait_for(lambda: launcher.sizes() == [3, 2, 3], 120)
    shown = wait_for(lambda: (found := gauges(cluster)).get("trimaran_nodes") == 3 and found, 60)
    assert 0 < shown["trimaran_step"] <= launcher.step()
    assert {"trimaran_loss", "trimaran_tokens_per_second"} <= shown.keys()
    assert launcher.wait_for_end(job) | {"reason": ""} == {
        "state": "done", "native": "SUCCEEDED", "reason": "", "exit_code": 0, "nodes": [],
    }  # fmt: skip
    first = read_incidents(launcher.run)[0]
    assert (first.cause, first.action) == ("host", "resized")
    steps = [each["step"] for each in lines(launcher.run.metrics)]
    assert steps == [*range(1, 501)], "every step is in the metrics once"
    plain = undisturbed(tmp_path / "plain", *settings)
    losses = [each["loss"] for each in lines(plain.metrics)]
    assert [each["loss"] for each in lines(launcher.run.metrics)] == pytest.approx(losses, rel=TOLERANCE)


def test_a_stopped_job_is_resumed_bit_for_bit(cluster: RayCluster, tmp_path: Path) -> None:
    settings = ("cluster=2x1xcpu", "train.steps=60")
    launcher = Launcher(tmp_path, cluster.environment)
    site = {"address": cluster.address, "node_addresses": ADDRESSES, "environment": PAUSE}
    job = launcher.launch(site, *settings)
    wait_for(lambda: launcher.step() >= 10, 120)
    launcher.call("jobs", job, "--stop")
    assert launcher.wait_for_end(job)["state"] == "stopped"
    assert lines(launcher.run.attempts)[-1]["over"] == 75
    assert 10 <= launcher.step() < 60
    again = launcher.call("jobs", job, "--resume")["id"]
    assert launcher.wait_for_end(again)["exit_code"] == 0
    assert_bit_equal(launcher.run, undisturbed(tmp_path / "plain", *settings))
    written = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET in path.read_text(errors="replace")]
    assert written == []


def test_checks_find_too_few_nodes_and_a_wrong_token(cluster: RayCluster, tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, cluster.environment)
    words = ["launch", "--on", "ray", "--check", f"--site=address={cluster.address}", "--set=train.steps=5"]
    checks = launcher.call(*words, "--set=cluster=8x1xcpu", code=2)["checks"]
    assert [each["error"]["code"] for each in checks if each["error"]] == ["L063"]
    assert {each["check"]: each["found"] for each in checks}["authentication"] == "token"
    assert launcher.call(*words, "--set=cluster=3x1xcpu")["failed"] == 0
    wrong = tmp_path / "wrong"
    wrong.write_text("f" * 64)
    launcher.environment["RAY_AUTH_TOKEN_PATH"] = str(wrong)
    checks = launcher.call(*words, code=2)["checks"]
    assert [each["error"]["code"] for each in checks if each["error"]] == ["L061"]


def test_a_local_cluster_is_started_for_a_run_that_ends_bit_equal(tmp_path: Path) -> None:
    settings = ("cluster=2x1xcpu", "train.steps=12")
    launcher = Launcher(tmp_path, os.environ)
    job = launcher.launch({"address": "local", "environment": {"OMP_NUM_THREADS": "1"}}, *settings)
    assert launcher.wait_for_end(job)["exit_code"] == 0
    assert_bit_equal(launcher.run, undisturbed(tmp_path / "plain", *settings))
