"""Trains one recipe under many plans with the real worker, in forked ranks, and compares trajectories."""

import json
import os
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.environment import CACHE
from tests.ranks import run_ranks
from trimaran.core import AXES, Mesh, Plan, Recipe
from trimaran.runs import RunDirectory, create_run
from trimaran.train import read_rank_info, run_worker

TOLERANCE = 1e-5
CRASH = f"exit code {-signal.SIGSEGV}"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The losses, gradient norms and final weights of a run."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def plan_for(recipe: Recipe, *, grad_accum: int, **fields: Any) -> Plan:
    """Return a plan with these mesh degrees, accumulation and other fields, and the recipe's global batch."""
    mesh = Mesh(**{axis: fields.pop(axis) for axis in AXES if axis in fields})
    micro_batch, rest = divmod(recipe.train.global_batch, mesh.dp * grad_accum)
    assert rest == 0, "a parity plan must divide the global batch"
    tree = {"mesh": mesh, "sharding": "parameters" if mesh.dp_shard > 1 else "none"} | fields
    return Plan.model_validate(tree | {"micro_batch": micro_batch, "grad_accum": grad_accum})


def train_run(recipe: Recipe, plan: Plan, folder: Path) -> RunDirectory:
    """Train `recipe` under `plan` in forked ranks and return the run directory, a new one in `folder`.

    On ARM a rank has crashed in native code twice, each time once in several hundred runs (docs/log.md). A run of
    several ranks that crashed is repeated once, with a warning that says where it was.
    """
    try:
        return _train_once(recipe, plan, folder)
    except AssertionError as error:
        if plan.mesh.world_size == 1 or CRASH not in str(error):
            raise
        warnings.warn(f"a rank crashed in native code; repeating the run: {plan}\n{error}", stacklevel=2)
        return _train_once(recipe, plan, folder)


def _train_once(recipe: Recipe, plan: Plan, folder: Path) -> RunDirectory:
    run = create_run(folder / str(len(list(folder.iterdir()))), recipe, plan)
    run.read_recipe()  # which is then known to all ranks
    codes = run_ranks(plan.mesh.world_size, _worker, run.path, CACHE)
    assert codes == [0] * plan.mesh.world_size, run.events(0).read_text()
    return run


def train_trajectory(recipe: Recipe, plan: Plan, folder: Path) -> Trajectory:
    """Train `recipe` under `plan` in forked ranks and return its trajectory."""
    return trajectory_of(train_run(recipe, plan, folder))


def trajectory_of(run: RunDirectory) -> Trajectory:
    """Return the trajectory of a finished run."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, run.read_recipe().train.steps + 1))
    (file,) = run.model.glob("*model.safetensors")  # of an adapter: adapter_model.safetensors
    weights = load_file(file)
    return Trajectory([line["loss"] for line in lines], [line["grad_norm"] for line in lines], weights)


def assert_same_trajectory(trajectory: Trajectory, reference: Trajectory, tolerance: float = TOLERANCE) -> None:
    """Fail unless loss and gradient norm agree at every step, and every final weight tensor, in relative norm."""
    for step, (ours, theirs) in enumerate(zip(trajectory.losses, reference.losses, strict=True), 1):
        assert abs(ours - theirs) <= tolerance * abs(theirs), f"loss of step {step}: {ours} against {theirs}"
    for step, (ours, theirs) in enumerate(zip(trajectory.norms, reference.norms, strict=True), 1):
        assert abs(ours - theirs) <= tolerance * abs(theirs), f"gradient norm of step {step}: {ours} against {theirs}"
    assert trajectory.weights.keys() == reference.weights.keys()
    for name, theirs in reference.weights.items():
        difference = (trajectory.weights[name] - theirs).norm() / theirs.norm().clamp(min=1e-12)
        assert difference <= tolerance, f"{name} is off by {difference:.2e}"


def differences(trajectory: Trajectory, reference: Trajectory) -> tuple[float, float, float]:
    """Return the largest relative difference of loss, of gradient norm, and of a final weight tensor in norm."""
    assert trajectory.weights.keys() == reference.weights.keys()
    pairs = zip(trajectory.losses, reference.losses, strict=True), zip(trajectory.norms, reference.norms, strict=True)
    loss, norm = (max(abs(ours - theirs) / abs(theirs) for ours, theirs in each) for each in pairs)
    weights = [(trajectory.weights[name] - each).norm() / each.norm() for name, each in reference.weights.items()]
    return loss, norm, float(max(weights))


def _worker(path: Path, cache: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)
