"""Runs under Slurm: a launch request for a tiny run on two virtual nodes, its job, and what it must have computed."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fault.harness import ROOT, TINY, lines, wait_for
from tests.slurm.cluster import SlurmCluster
from trimaran.core import parse_recipe
from trimaran.data import cache_folder, prepare
from trimaran.launch import JobRecord, JobState, LaunchRequest, SlurmSite, SlurmTarget, new_record
from trimaran.machine import parse_cluster
from trimaran.models import spec_of
from trimaran.planner import choose
from trimaran.runs import RunDirectory, create_run

STEPS = 20


def make_request(
    run_dir: Path, *settings: str, site: dict[str, Any] | None = None, cluster: str = "2x1xcpu", **fields: Any
) -> LaunchRequest:
    """Return a request for a tiny run; nothing is written."""
    recipe = parse_recipe("", name="test", overrides=[*TINY, f"cluster={cluster}", f"train.steps={STEPS}", *settings])
    machines = parse_cluster(recipe.cluster)
    plan = choose(recipe, spec_of(recipe.model), machines)
    known: dict[str, Any] = {"name": "tiny run", "run_dir": run_dir, "check": False} | fields
    return LaunchRequest(recipe=recipe, plan=plan, cluster=machines, site=SlurmSite(**(site or {})), **known)


def environment(cluster: SlurmCluster, **more: str) -> dict[str, str]:
    """Return what sbatch passes to the job. Each step is made longer by a pause, see `SlurmRun.remove_pause`."""
    plugin = {"TRIMARAN_TEST_PLUGIN": "tests.chaos.plugin", "TRIMARAN_TEST_PAUSE": "0.2", "OMP_NUM_THREADS": "1"}
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    memory = {"TRIMARAN_BAD_NODES": str(cluster.folder / "bad-nodes.jsonl")}
    return plugin | memory | cluster.environment | {"PYTHONPATH": ":".join(filter(None, paths))} | more


@dataclass
class SlurmRun:
    """A submitted run."""

    cluster: SlurmCluster
    target: SlurmTarget
    request: LaunchRequest
    job: JobRecord

    @classmethod
    def submit(cls, cluster: SlurmCluster, request: LaunchRequest) -> "SlurmRun":
        """Create the run, write the launch files and submit them."""
        prepare(request.recipe.data, cache=cache_folder(os.environ))
        run = create_run(request.run_dir, request.recipe, request.plan)
        target, folder = SlurmTarget(), run.path / "launch"
        folder.mkdir()
        (run.path / "logs").mkdir(exist_ok=True)
        for name, text in target.render(request).files.items():
            (folder / name).write_text(text)
        native_id, details = target.submit(request, folder)
        return cls(cluster, target, request, new_record(request, "slurm", folder, native_id, details))

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.request.run_dir)

    @property
    def id(self) -> str:
        return self.job.native_id

    def step(self) -> int:
        found = lines(self.run.metrics)
        return found[-1]["step"] if found else 0

    def wait_for_step(self, step: int, seconds: float = 120.0) -> None:
        try:
            wait_for(lambda: self.step() >= step, seconds)
        except AssertionError as error:
            raise AssertionError(f"at step {self.step()}\n{self.log()}") from error

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.run.path / "logs").glob("slurm-*.log")))

    def state(self) -> JobState:
        return self.target.state(self.job)

    def wait(self, *states: str, seconds: float = 180.0) -> JobState:
        """Return the job's state once it is one of `states`."""
        until = time.monotonic() + seconds
        while (now := self.state()).state not in states:
            assert time.monotonic() < until, f"{now}\n{self.log()}"
            time.sleep(0.3)
        return now

    def remove_pause(self) -> None:
        """Remove the pause that is added to each step, also in later jobs of the run."""
        (self.run.path / "no-pause").touch()

    def resumes(self) -> list[int]:
        """Return from which step each start but the first continued."""
        return [each["data"]["from_step"] for each in lines(self.run.events(0)) if each["kind"] == "resume"]

    def attempts(self) -> list[int]:
        return [each["world_size"] for each in lines(self.run.attempts) if "world_size" in each]
