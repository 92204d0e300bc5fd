"""One recipe under many plans: runs the real worker in forked ranks and compares with one process."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks
from trimaran.core import Mesh, Plan, Recipe
from trimaran.telemetry import RunDirectory, create_run
from trimaran.train.place import place_of
from trimaran.train.worker import run_worker

TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What a run left behind: its losses, gradient norms and final weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def plan_for(recipe: Recipe, *, grad_accum: int, **degrees: int) -> Plan:
    """Return a plan with these mesh degrees and accumulation that keeps the recipe's global batch."""
    mesh = Mesh(**degrees)
    micro_batch, rest = divmod(recipe.train.global_batch, mesh.dp * grad_accum)
    assert rest == 0, "a parity plan must divide the global batch"
    sharding = "parameters" if mesh.dp_shard > 1 else "none"
    return Plan(mesh=mesh, sharding=sharding, micro_batch=micro_batch, grad_accum=grad_accum)


def sail_to(recipe: Recipe, plan: Plan, folder: Path) -> RunDirectory:
    """Train `recipe` under `plan` in forked ranks and return the run directory, which is new in `folder`."""
    run = create_run(folder / str(len(list(folder.iterdir()))), recipe, plan)
    codes = run_ranks(plan.mesh.world_size, _worker, run.path, folder.parent / "cache")
    assert codes == [0] * plan.mesh.world_size, run.events(0).read_text()
    return run


def sail(recipe: Recipe, plan: Plan, folder: Path) -> Trajectory:
    """Train `recipe` under `plan` in forked ranks and return its trajectory."""
    run = sail_to(recipe, plan, folder)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, recipe.train.steps + 1))
    weights = load_file(run.model / "model.safetensors")
    return Trajectory([line["loss"] for line in lines], [line["grad_norm"] for line in lines], weights)


def assert_same_course(course: Trajectory, reference: Trajectory, tolerance: float = TOLERANCE) -> None:
    """Fail unless loss and gradient norm agree at every step, and every final weight tensor in relative norm."""
    for step, (ours, theirs) in enumerate(zip(course.losses, reference.losses, strict=True), 1):
        assert abs(ours - theirs) <= tolerance * abs(theirs), f"loss of step {step}: {ours} against {theirs}"
    for step, (ours, theirs) in enumerate(zip(course.norms, reference.norms, strict=True), 1):
        assert abs(ours - theirs) <= tolerance * abs(theirs), f"gradient norm of step {step}: {ours} against {theirs}"
    assert course.weights.keys() == reference.weights.keys()
    for name, theirs in reference.weights.items():
        difference = (course.weights[name] - theirs).norm() / theirs.norm().clamp(min=1e-12)
        assert difference <= tolerance, f"{name} is off by {difference:.2e}"


def _worker(path: Path, cache: Path) -> int:
    return run_worker(RunDirectory(path), place_of(os.environ), cache=cache)
