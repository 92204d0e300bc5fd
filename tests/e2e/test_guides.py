"""The commands of the guides about launching, run on the real thing: see `REAL` in `tests/guide_commands.py`.

Only names of machines, devices, jobs and folders are replaced; what a target needs here is in the user's site file.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fault.harness import ROOT, lines, wait_for
from tests.guide_commands import FOLDER, REAL
from tests.kubernetes_cluster import KubernetesCluster
from tests.launched import kill_processes
from tests.pod_runner import can_run_pods
from tests.ray_cluster import RayCluster
from tests.slurm.cluster import NEEDS_SLURM, SlurmCluster
from tests.ssh_machines import MISSING, SshMachines
from trimaran.launch import read_records
from trimaran.runs import RunDirectory, open_run, read_attempts

pytestmark = pytest.mark.slow
RECIPE = {
    "name": "stdlib-tiny",
    "model": {"shape": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}},
    "data": {"seq_len": 32},
    "train": {"steps": 500, "global_batch": 8, "sample": {"tokens": 0}, "evaluate": {"batches": 0}},
    "cluster": "auto",
}
VARIABLES = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}


class GuideReader:
    """A user who types the commands of a guide; `names` are replaced, `site` is the site file."""

    def __init__(
        self, folder: Path, *, names: Mapping[str, str] | None = None, site: Mapping[str, Any] | None = None
    ) -> None:
        self.folder, self.names, self.environment = folder, dict(names or {}), dict(os.environ) | VARIABLES
        self.names |= {"/shared/": f"{folder}/shared/"}
        self.environment |= {"XDG_STATE_HOME": str(folder / "state"), "TRIMARAN_TARGETS": str(folder / "targets.yaml")}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        (folder / "targets.yaml").write_text(yaml.safe_dump(dict(site or {})))
        for name in ("recipes/stdlib-tiny.yaml", "my.yaml"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(yaml.safe_dump(RECIPE))

    def words(self, command: str) -> list[str]:
        """Return a command of a guide with our names, for two nodes with one CPU rank each."""
        for theirs, ours in self.names.items():
            command = command.replace(theirs, ours)
        return shlex.split(re.sub(r"cluster=\S+", "cluster=2x1xcpu", command))

    def run(self, command: str, *more: str, code: int = 0, folder: Path | None = None) -> str:
        done = self.call([*self.words(command), *more], folder or self.folder)
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def call(self, command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True, check=False,
                              timeout=400, stdin=subprocess.DEVNULL)  # fmt: skip

    def job(self) -> str:
        """Return the id of the newest job."""
        return read_records(Path(self.environment["XDG_STATE_HOME"]) / "trimaran" / "jobs")[0].id


def has_started(run: RunDirectory) -> bool:
    return len(lines(run.metrics)) > 3


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Any:
    yield
    kill_processes(tmp_path)


def test_local(tmp_path: Path) -> None:
    together, prepare, node = REAL["local"]
    reader = GuideReader(tmp_path)
    reader.run(together)
    assert lines(open_run(tmp_path / "runs" / "two-nodes").metrics)[-1]["step"] == 20
    shown = reader.run(prepare, "--set", "train.steps=20")
    assert f"/{shlex.join(reader.words(node))}\n" in shown, "the guide shows the command that is printed"
    starts = [[*reader.words(node), f"--address=127.0.0.{number}"] for number in (2, 3)]
    nodes = [subprocess.Popen(start, env=reader.environment, cwd=tmp_path) for start in starts]
    assert [each.wait(300) for each in nodes] == [0, 0]
    assert read_attempts(open_run(tmp_path / "shared" / "runs" / "my-run")).attempts[0].world_size == 2


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_ssh(tmp_path: Path) -> None:
    check, first, second = REAL["ssh"]
    with SshMachines(tmp_path / "machines") as machines:
        hosts = ",".join(machines.hosts)
        site = {"config_file": str(machines.config), "environment": VARIABLES}
        reader = GuideReader(tmp_path, names={"gpu-1,gpu-2": hosts, "a,b": hosts}, site={"ssh": site})
        reader.call = lambda command, _: machines.run(  # type: ignore[method-assign]
            ["env", "-C", str(tmp_path), *(f"{name}={each}" for name, each in reader.environment.items()), *command],
            400,
        )
        shown = reader.run(check).splitlines()
        reader.run(first, "--set", "train.steps=20")
        reader.run(second, "--set", "train.steps=20")
    guide = (FOLDER / "several-machines.md").read_text()
    names = [line.partition(":")[0] for line in guide.splitlines() if line.startswith("pass ")]
    assert [line.partition(":")[0] for line in shown] == names, "the guide shows what the check prints"
    assert len(list((tmp_path / "runs").iterdir())) == 1


@NEEDS_SLURM
def test_slurm(tmp_path: Path) -> None:
    launch, jobs, show, stop, resume = REAL["slurm"]
    with SlurmCluster() as cluster:
        reader = GuideReader(tmp_path, site={"slurm": {"time": "10"}})
        reader.environment |= cluster.environment
        reader.run(launch)
        reader.names["slurm-4711"] = reader.job()
        assert reader.job() in reader.run(jobs)
        assert "follow" in reader.run(show)
        run = open_run(tmp_path / "shared" / "runs" / "first")
        wait_for(lambda: has_started(run), 200)
        reader.run(stop)
        reader.run(show, "--wait", code=75)
        reader.run(resume)
    assert lines(run.metrics)[-1]["step"] == 500


@pytest.mark.skipif(not can_run_pods(), reason="namespaces need root and iproute2")
def test_kubernetes(tmp_path: Path) -> None:
    launch, jobs, show, stop, resume = REAL["k8s"]
    with KubernetesCluster(tmp_path / "cluster") as cluster:
        reader = GuideReader(tmp_path, site={"k8s": {"kind": "job", "python": sys.executable, "env": VARIABLES}})
        reader.environment |= cluster.environment
        reader.run(launch)
        assert reader.job() == "k8s-llm-first"
        assert reader.job() in reader.run(jobs)
        assert "follow" in reader.run(show)
        run = RunDirectory(cluster.volume / "first")
        wait_for(lambda: has_started(run), 200)
        reader.run(stop)
        reader.run(show, "--wait", code=75)
        reader.run(resume)
        reader.run(show, "--wait")
    assert lines(run.metrics)[-1]["step"] == 500


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'trimaran[ray]'")
def test_ray(tmp_path: Path) -> None:
    launch, jobs, by_hand, local = REAL["ray"]
    site = {"node_addresses": ["127.0.1.1", "127.0.1.2"], "environment": VARIABLES, "python": sys.executable}
    with RayCluster(tmp_path, nodes=2) as cluster:
        reader = GuideReader(tmp_path, names={"http://head:8265": cluster.address}, site={"ray": site})
        reader.environment |= {name: each for name, each in cluster.environment.items() if name.startswith("RAY_")}
        reader.names["-- python "] = f"-- {sys.executable} "
        reader.run(launch, "--set", "train.steps=20", "--wait")
        assert reader.job() in reader.run(jobs)
        run = open_run(tmp_path / "runs" / "stdlib-tiny")
        attempts = len(read_attempts(run).attempts)
        reader.run(by_hand, folder=run.path / "launch")
        wait_for(lambda: len(read_attempts(run).attempts) > attempts and read_attempts(run).over == 0, 200)
    reader.run(local, "--set", "train.steps=20")
