"""`trimaran launch` and `trimaran jobs` as a user types them, on every target that runs here, with the checks on.

Each job is launched, listed, looked at, stopped and resumed by the command in a subprocess, and must end with the
weights of an undisturbed local run of the same plan. Secrets are in the environment all the time.
"""

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.fault.harness import ROOT, lines
from tests.kubernetes_cluster import KubernetesCluster
from tests.launched import (
    PAUSE_SECONDS,
    SECRETS,
    STEPS,
    CommandLine,
    CommandLines,
    digest,
    files_with_secrets,
    kill_processes,
    secret_digests,
    stop_and_resume,
)
from tests.pod_runner import can_run_pods
from tests.ray_cluster import RayCluster
from tests.slurm.cluster import NEEDS_SLURM, SlurmCluster
from tests.ssh_machines import MISSING, SshMachines
from trimaran.runs import RunDirectory, open_run

pytestmark = pytest.mark.slow
NEEDS_SSH = pytest.mark.skipif(bool(MISSING), reason=MISSING)
NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'trimaran[ray]'")
NEEDS_PODS = pytest.mark.skipif(
    not can_run_pods() or not all(find_spec(each) for each in ("kmock", "kubernetes")),
    reason="needs root, iproute2, and the packages kmock and kubernetes",
)
UNFIT = "GLOO_SOCKET_IFNAME", "nosuch0"  # a check that fails on every node


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A user with secrets in the environment; nothing of a failed test goes on."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    yield
    kill_processes(tmp_path)


@pytest.fixture(autouse=True)
def command_lines() -> Iterator[CommandLines]:
    """Fail if a secret was in the command line of any process during the test."""
    with CommandLines() as watched:
        yield watched
    assert not watched.found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("undisturbed")
    line = CommandLine(folder, {"OMP_NUM_THREADS": "1"})
    job = line.launch("local", f"--run-dir={folder / 'run'}", "--wait")
    assert job["exit"] == 0
    return open_run(folder / "run")


def slow_steps(folder: Path) -> dict[str, str]:
    """Return the variables of ranks whose steps are slow, and that write which secrets they have into a folder."""
    return {"TRIMARAN_TEST_PLUGIN": "tests.secret_plugin", "TRIMARAN_TEST_PAUSE": str(PAUSE_SECONDS),
            "TRIMARAN_TEST_SECRETS": str(folder), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "OMP_NUM_THREADS": "1"}  # fmt: skip


def ranks_have(folder: Path) -> list[dict[str, str]]:
    """Return which secrets ranks had, as digests, each combination once."""
    found = {file.read_text() for file in folder.iterdir()}
    return [json.loads(each) for each in found]


def assert_equal(run: RunDirectory, undisturbed: RunDirectory) -> None:
    """Fail unless both runs are of one plan, made the same steps and have the same weights, bit for bit."""
    assert run.read_plan() == undisturbed.read_plan()
    ours, theirs = ([(each["step"], each["loss"]) for each in lines(one.metrics)] for one in (run, undisturbed))
    assert ours == theirs
    assert [step for step, _ in ours] == [*range(1, STEPS + 1)]
    found, wanted = (load_file(each.model / "model.safetensors") for each in (run, undisturbed))
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in wanted.items()
    }


def site(**fields: Any) -> list[str]:
    return [f"--site={name}={json.dumps(value)}" for name, value in fields.items()]


def test_local(tmp_path: Path, undisturbed: RunDirectory) -> None:
    line, secrets = CommandLine(tmp_path / "user", slow_steps(tmp_path / "secrets")), tmp_path / "secrets"
    job = line.launch("local", f"--run-dir={tmp_path / 'run'}")
    run = open_run(tmp_path / "run")
    stop_and_resume(line, job, run)
    assert_equal(run, undisturbed)
    assert ranks_have(secrets) == [secret_digests()]
    assert files_with_secrets(tmp_path) == []


@NEEDS_SSH
def test_ssh(tmp_path: Path, undisturbed: RunDirectory) -> None:
    with SshMachines(tmp_path / "machines") as machines:
        line, secrets = (
            CommandLine(tmp_path / "user", call=lambda words: machines.run(words, 400)),
            tmp_path / "secrets",
        )
        where = site(config_file=str(machines.config), environment=slow_steps(secrets))
        job = line.launch("ssh", "--hosts", ",".join(machines.hosts), *where, f"--run-dir={tmp_path / 'run'}")
        run = open_run(tmp_path / "run")
        stop_and_resume(line, job, run)
    assert_equal(run, undisturbed)
    assert ranks_have(secrets) == [secret_digests()]
    assert files_with_secrets(tmp_path) == []


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster() as cluster:
        yield cluster


@NEEDS_SLURM
def test_slurm(slurm: SlurmCluster, tmp_path: Path, undisturbed: RunDirectory) -> None:
    secrets = tmp_path / "secrets"
    line = CommandLine(tmp_path / "user", {**slow_steps(secrets), **slurm.environment})
    job = line.launch("slurm", f"--run-dir={tmp_path / 'run'}", "--site=time=10")
    run = open_run(tmp_path / "run")
    again = stop_and_resume(line, job, run)
    assert (again["state"]["native"], again["state"]["nodes"]) == ("COMPLETED", ["n1", "n2"])
    assert_equal(run, undisturbed)
    assert ranks_have(secrets) == [secret_digests()]
    assert files_with_secrets(tmp_path) == []


@NEEDS_SLURM
def test_slurm_checks_the_nodes_before_the_first_step(slurm: SlurmCluster, tmp_path: Path) -> None:
    line = CommandLine(tmp_path / "user", {**slurm.environment, **dict([UNFIT])})
    path = tmp_path / "run"
    words = [f"--run-dir={path}", "--site=time=10", "--wait"]
    refused = line.json("launch", "--on", "slurm", "--set=cluster=2x1xcpu", "--set=train.steps=4", *words, code=2)
    assert (refused["state"]["state"], refused["exit"]) == ("failed", 2)
    assert "H007" in refused["state"]["reason"]
    assert lines(open_run(path).metrics) == []


@NEEDS_RAY
def test_ray(tmp_path: Path, undisturbed: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes have one secret from the environment in which their Ray was started; the launch passes none."""
    monkeypatch.delenv("HF_TOKEN")
    secrets = tmp_path / "secrets"
    with RayCluster(tmp_path, nodes=2) as cluster:
        monkeypatch.setenv("HF_TOKEN", SECRETS["HF_TOKEN"])
        monkeypatch.delenv("WANDB_API_KEY")
        token = {name: each for name, each in cluster.environment.items() if name.startswith("RAY_")}
        line = CommandLine(tmp_path / "user", token)
        where = site(address=cluster.address, node_addresses=["127.0.1.1", "127.0.1.2"])
        where += site(environment=slow_steps(secrets), python=sys.executable)
        job = line.launch("ray", *where, f"--run-dir={tmp_path / 'run'}")
        run = open_run(tmp_path / "run")
        stop_and_resume(line, job, run)
    assert_equal(run, undisturbed)
    assert ranks_have(secrets) == [{"WANDB_API_KEY": digest(SECRETS["WANDB_API_KEY"])}]
    assert files_with_secrets(tmp_path) == []


@NEEDS_PODS
def test_kubernetes(tmp_path: Path, undisturbed: RunDirectory) -> None:
    """Pods get secrets from a Secret of the cluster, and nothing from where the job was launched."""
    values = {"trimaran-secrets": {"HF_TOKEN": SECRETS["HF_TOKEN"]}}
    with KubernetesCluster(tmp_path / "cluster", secret_values=values) as cluster:
        line, run = CommandLine(tmp_path / "user", cluster.environment), RunDirectory(cluster.volume / "first")
        where = site(kind="job", image="registry.example/trimaran:1.0", python=sys.executable)
        where += site(env=slow_steps(Path("/runs/secrets")))
        job = line.launch("k8s", *where, "--run-dir=/runs/first")
        assert job["id"] == "k8s-llm-first"
        again = stop_and_resume(line, job, run)
        assert again["id"] == job["id"]
        assert_equal(run, undisturbed)
        assert ranks_have(cluster.volume / "secrets") == [{"HF_TOKEN": digest(SECRETS["HF_TOKEN"])}]
    assert files_with_secrets(tmp_path) == []
