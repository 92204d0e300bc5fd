"""Run directories whose steps take as long as the cost model says, with rates that a test chooses."""

import json
import math
import os
import platform
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimaran.core import Mesh, Plan, Recipe, StepMetrics, parse_recipe
from trimaran.cost import predict
from trimaran.machine import FittedRates, parse_cluster, with_fitted
from trimaran.models import outline_for, spec_of
from trimaran.planner import Question, predicted
from trimaran.runs import Journal, RunDirectory, create_run

EPOCH = 1_790_000_000.0
SLOWED = "computing slowed by collectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run to write. `noise` is the standard deviation of each step; `bias` that of the whole run."""

    cluster: str
    plan: Plan
    model: str = "llama-3.2-1b"
    seq_len: int = 4096
    steps: int = 24
    noise: float = 0.02
    bias: float = 0.0

    @property
    def recipe(self) -> Recipe:
        fields = {"model.preset": self.model, "data.seq_len": self.seq_len, "cluster": self.cluster,
                  "train.global_batch": self.plan.global_batch, "train.steps": self.steps}  # fmt: skip
        return parse_recipe("name: measured", name="test", overrides=[f"{k}={v}" for k, v in fields.items()])

    @property
    def question(self) -> Question:
        recipe, cluster = self.recipe, parse_cluster(self.cluster)
        outline = outline_for(recipe.model, recipe.data)
        return Question(recipe=recipe, spec=spec_of(recipe.model), outline=outline, cluster=cluster)


def gpu_plan(*, accumulate: int = 1, **mesh: int) -> Plan:
    """Return a bf16 plan with sharded weights, if the mesh shards any."""
    sharding = "parameters" if mesh.get("dp_shard", 1) > 1 else "none"
    return Plan(mesh=Mesh(**mesh), sharding=sharding, precision="bf16", compile=True, grad_accum=accumulate)


def write_run(path: Path, planned: PlannedRun, truth: FittedRates | None = None, *, seed: int = 0) -> RunDirectory:
    """Write a finished run. Its plan is predicted with the catalogue's rates; its steps take what `truth` says."""
    question = planned.question
    plan = predicted(planned.plan, question)
    run = create_run(path, question.recipe, plan)
    write_steps(run, planned, plan, truth, seed=seed)
    return run


def write_steps(
    run: RunDirectory, planned: PlannedRun, plan: Plan, truth: FittedRates | None, *, seed: int = 0, since: int = 0
) -> None:
    """Write the events and metrics of one attempt, from step `since` on."""
    question, draw = planned.question, random.Random(seed)
    real = predict(question.job, with_fitted(question.cluster, truth), plan)
    factor = math.exp(draw.gauss(0, planned.bias))
    slowed = real.exposed.get(SLOWED, 0.0)
    rest = real.step_seconds - real.time["comm"] - real.time["optimizer"]
    phases = {"data": 0.0, "forward": rest / 3 + slowed, "backward": 2 * rest / 3, "comm": real.time["comm"] - slowed,
              "optimizer": real.time["optimizer"], "checkpoint": 0.0}  # fmt: skip
    begin = EPOCH + 1000 * since
    events = [{"kind": "start", "rank": 0, "time": begin, "step": 0, "attempt": 0,
               "data": {"world_size": plan.mesh.world_size, "version": "0.1.0", "host": platform.node(),
                        "device": "cuda:0", "pid": os.getpid()}},
              {"kind": "ready", "rank": 0, "time": begin + 1, "step": since, "attempt": 0, "data": {}}]  # fmt: skip
    with run.events(0).open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in events)
    now = begin + 1
    with Journal(run, 0) as journal:
        for number in range(since + 1, since + planned.steps + 1):
            warm_up = 3.0 if number == since + 1 else 1.0
            scale = factor * warm_up * math.exp(draw.gauss(0, planned.noise))
            now += scale * real.step_seconds
            journal.step(StepMetrics(
                step=number, loss=1.0, grad_norm=1.0, lr=1e-3, tokens=plan.global_batch * planned.seq_len,
                samples=plan.global_batch, step_seconds=scale * real.step_seconds, mfu=0.4, peak_bytes=1 << 30,
                phases={name: scale * seconds for name, seconds in phases.items()}, time=now,
            ))  # fmt: skip


def write_runs(folder: Path, runs: Sequence[PlannedRun], truth: FittedRates, *, seed: int = 0) -> None:
    for number, each in enumerate(runs):
        write_run(folder / f"run-{number}", each, truth, seed=100 * seed + number)
