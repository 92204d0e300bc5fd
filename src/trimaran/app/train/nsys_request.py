"""What `trimaran profile --nsys` runs: the recipe of a short run, and the command of each of its ranks."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimaran.app.plan.run_trial import trial_recipe
from trimaran.app.recipe.hub_files import with_local_files
from trimaran.app.recipe.options import RUNS, YAML, find_run, refuse_missing_ranks
from trimaran.app.recipe.recipe_tokenizer import with_model_tokenizer
from trimaran.app.recipe.request import refuse_other_machine, resolve
from trimaran.core import Plan, Recipe, UserError
from trimaran.machine.parse_cluster import cluster_of
from trimaran.planner.measure.trial_record import TuneCandidate
from trimaran.runs import free_run_path
from trimaran.runs.rank_environment import worker_environment
from trimaran.runs.run_requests import ProfileRequest

WARM_UP_STEPS = 10  # before the recorded ones: kernels are chosen, buffers allocated, blocks compiled
GPU_OPTIONS = ("--trace=cuda,nvtx,osrt,cudnn,cublas", "--capture-range=cudaProfilerApi", "--capture-range-end=stop")
CPU_OPTIONS = ("--trace=nvtx,osrt",)  # without a GPU nothing tells nsys when to start: it records everything
OPTIONS = ("--sample=none", "--cpuctxsw=none", "--force-overwrite=true")  # samples of the CPU need privileges
STATS = ("stats", "--report=nvtx_pushpop_sum", "--format=csv", "--force-export=true", "--quiet")


@dataclass(frozen=True, slots=True, kw_only=True)
class NsysRequest:
    """A short run in a new directory `path`, of which nsys records `ranks`."""

    path: Path
    recipe: Recipe
    plan: Plan
    ranks: tuple[int, ...]
    on_cpu: bool
    nsys: str = "nsys"

    def report(self, rank: int) -> Path:
        """Return the file that nsys writes for a rank."""
        return self.path.absolute() / "profiles" / f"rank-{rank}.nsys-rep"

    def command(self, rank: int) -> list[str]:
        """Return the command of a rank, under nsys if it is recorded."""
        own = [sys.executable, "-m", "trimaran.train", str(self.path.absolute())]
        if rank not in self.ranks:
            return own
        chosen = CPU_OPTIONS if self.on_cpu else GPU_OPTIONS
        return [self.nsys, "profile", *chosen, *OPTIONS, f"--output={self.report(rank)}", *own]

    def variables(self, rank: int, port: int) -> dict[str, str]:
        """Return what the environment of a rank has besides `worker_variables`."""
        world = str(self.plan.mesh.world_size)
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world} | where

    def worker_variables(self, outer: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of all ranks, as those of `trimaran train`."""
        return worker_environment(outer, self.plan, on_cpu=self.on_cpu, deterministic=self.recipe.train.deterministic)


def nsys_request(source: str, settings: Sequence[str], *, steps: int, ranks: str, needs_nsys: bool) -> NsysRequest:
    """Return the short run of `source`, a recipe file or a run, whose plan it then has. Raises UserError."""
    nsys = shutil.which("nsys")
    if nsys is None and needs_nsys:
        raise UserError("D018", "nsys, the command of Nsight Systems, is not on the PATH", where="--nsys",
                        fix="install it: https://developer.nvidia.com/nsight-systems, or `apt install "
                            "nsight-systems-cli` from NVIDIA's repository")  # fmt: skip
    if YAML.search(source):
        request = resolve(source, settings)
        recipe, plan = with_model_tokenizer(with_local_files(request.recipe)), request.plan
    else:
        if settings:
            raise UserError("A001", "--set changes a recipe, and a run has its own", where="--set",
                            fix="name the recipe instead of the run")  # fmt: skip
        run = find_run(source)
        recipe, plan = run.read_recipe(), run.read_plan()
    world = plan.mesh.world_size
    refuse_missing_ranks(ranks, world)
    cluster = cluster_of(recipe, world, os.environ)
    refuse_other_machine(cluster)
    return NsysRequest(
        path=free_run_path(RUNS, f"{recipe.name}-nsys"),
        recipe=_short_recipe(recipe, plan, steps=steps, ranks=ranks),
        plan=plan,
        ranks=tuple(ProfileRequest(ranks=ranks).ranks_of(world)),
        on_cpu=cluster.device.traits.shares_cores,
        nsys=nsys or "nsys",
    )


def _short_recipe(recipe: Recipe, plan: Plan, *, steps: int, ranks: str) -> Recipe:
    """Return the recipe of a run that is just long enough, without checkpoints, evaluations and sinks."""
    trial = trial_recipe(recipe, TuneCandidate(plan=plan, workers=recipe.data.workers))
    first = WARM_UP_STEPS + 1
    telemetry = {"nvtx": True, "profile": f"{first}:{first + steps}", "profile_ranks": ranks, "profile_every": 0}
    sections = {
        "train": trial.train.model_copy(update={"steps": WARM_UP_STEPS + steps + 1}),
        "telemetry": trial.telemetry.model_copy(update=telemetry),
    }
    return trial.model_copy(update=sections)
