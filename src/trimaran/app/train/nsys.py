"""`trimaran profile --nsys`: records a short run with Nsight Systems, and reads what it recorded."""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.app.plan.run_trial import trial_recipe
from trimaran.app.recipe.options import RUNS, YAML, find_run, refuse_missing_ranks
from trimaran.app.recipe.prepare_data import check_data
from trimaran.app.recipe.recipe_files import with_local_files, with_model_tokenizer
from trimaran.app.recipe.request import refuse_other_machine, resolve
from trimaran.core import Plan, Recipe, UserError
from trimaran.machine import cluster_of
from trimaran.planner import TuneCandidate
from trimaran.runs import ProfileRequest, RunDirectory, create_run, free_run_path, read_nsys_stats, worker_environment

WARM_UP_STEPS = 10  # before the recorded ones: kernels are chosen, buffers allocated, blocks compiled
GPU_OPTIONS = ("--trace=cuda,nvtx,osrt,cudnn,cublas", "--capture-range=cudaProfilerApi", "--capture-range-end=stop")
CPU_OPTIONS = ("--trace=nvtx,osrt",)  # without a GPU nothing tells nsys when to start: it records everything
OPTIONS = ("--sample=none", "--cpuctxsw=none", "--force-overwrite=true")  # samples of the CPU need privileges
STATS = ("stats", "--report=nvtx_pushpop_sum", "--format=csv", "--force-export=true", "--quiet")
POLL_SECONDS = 0.2
END_SECONDS = 10.0  # for the other ranks after one has failed
STATS_SECONDS = 600.0
EXAMPLE_PORT = 29500  # in the commands of a dry run


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
        """Return what the environment of a rank has besides ours: the variables of `trimaran train`, and its place."""
        deterministic = self.recipe.train.deterministic
        shared = worker_environment(os.environ, self.plan, on_cpu=self.on_cpu, deterministic=deterministic)
        world = str(self.plan.mesh.world_size)
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        return shared | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def nsys_request(source: str, settings: Sequence[str], *, steps: int, ranks: str, needs_nsys: bool) -> NsysRequest:
    """Return the short run of `source`, a recipe file or a run, whose plan it then has. Raises UserError."""
    nsys = shutil.which("nsys")
    if nsys is None and needs_nsys:
        raise UserError("D018.nsys-command-nsight", where="--nsys")
    if YAML.search(source):
        request = resolve(source, settings)
        recipe, plan = with_model_tokenizer(with_local_files(request.recipe)), request.plan
    else:
        if settings:
            raise UserError("A001.set-changes-recipe", where="--set")
        run = find_run(source)
        recipe, plan = run.read_recipe(), run.read_plan()
    world = plan.mesh.world_size
    refuse_missing_ranks(ranks, world)
    cluster = cluster_of(recipe, world, os.environ)
    refuse_other_machine(cluster)
    trial = trial_recipe(recipe, TuneCandidate(plan=plan, workers=recipe.data.workers))
    first = WARM_UP_STEPS + 1
    telemetry = {"nvtx": True, "profile": f"{first}:{first + steps}", "profile_ranks": ranks, "profile_every": 0}
    sections = {
        "train": trial.train.model_copy(update={"steps": WARM_UP_STEPS + steps + 1}),
        "telemetry": trial.telemetry.model_copy(update=telemetry),
    }
    short = trial.model_copy(update=sections)
    return NsysRequest(
        path=free_run_path(RUNS, f"{recipe.name}-nsys"),
        recipe=short,
        plan=plan,
        ranks=tuple(ProfileRequest(ranks=ranks).ranks_of(world)),
        on_cpu=cluster.device.traits.shares_cores,
        nsys=nsys or "nsys",
    )


def planned_commands(request: NsysRequest, port: int = EXAMPLE_PORT) -> list[str]:
    """Return the command line of each rank, for a shell."""
    lines = []
    for rank in range(request.plan.mesh.world_size):
        pairs = [f"{name}={shlex.quote(value)}" for name, value in request.variables(rank, port).items()]
        lines.append(" ".join([*pairs, shlex.join(request.command(rank))]))
    return lines


def record(request: NsysRequest) -> RunDirectory:
    """Run all ranks to their end, and return the run. Raises UserError if one fails or nsys wrote no file."""
    check_data(request.recipe)
    run = create_run(request.path, request.recipe, request.plan)
    run.profiles.mkdir(exist_ok=True)
    run.agent_log.parent.mkdir(exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with run.agent_log.open("ab", buffering=0) as log:
        log.write("".join(f"{line}\n" for line in planned_commands(request, port)).encode())
        ranks = [
            subprocess.Popen(
                request.command(rank),
                env=os.environ | request.variables(rank, port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(request.plan.mesh.world_size)
        ]
    try:
        while (codes := [each.poll() for each in ranks]) != [0] * len(ranks):
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                raise UserError(
                    "D019.rank-ended", where=str(run.log(failed[0])), failed=failed[0], codes=codes[failed[0]]
                )
            time.sleep(POLL_SECONDS)
    finally:
        # End the ranks that still run, with what they have started.
        left = [each for each in ranks if each.poll() is None]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for each in left:
                if each.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(each.pid, number)
            until = time.monotonic() + END_SECONDS
            while time.monotonic() < until and any(each.poll() is None for each in left):
                time.sleep(POLL_SECONDS)
    for rank in request.ranks:
        if not request.report(rank).is_file():
            raise UserError("D019.nsys-wrote", where=str(run.agent_log), rank=rank)
    return run


def summaries(request: NsysRequest) -> list[dict[str, Any]]:
    """Return the NVTX ranges of each recorded rank by time, from `nsys stats`; without rows if it cannot say."""
    found = []
    for rank in request.ranks:
        command, text = [request.nsys, *STATS, str(request.report(rank))], ""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=STATS_SECONDS, check=False)
            text = done.stdout if done.returncode == 0 else ""
        rows = read_nsys_stats(text)
        found.append({"rank": rank, "ranges": [each.as_dict() for each in rows]})
    return found
