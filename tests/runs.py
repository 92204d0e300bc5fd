"""Run directories with the files that workers write, for tests of readers."""

import os
import platform
from pathlib import Path

from trimaran.core import Bytes, Flops, Mesh, Plan, Prediction, Seconds, StepMetrics, parse_recipe
from trimaran.runs import Journal, RunDirectory, create_run

PREDICTION = Prediction(
    fits=True,
    peak_bytes=Bytes(100 << 20),
    reserved_bytes=Bytes(128 << 20),
    step_seconds=Seconds(0.5),
    tokens_per_second=2048.0,
    mfu=0.2,
    flops_per_step=Flops(1e10),
    device_peak_flops=Flops(1e11),
    memory={"weights": Bytes(40 << 20), "activations": Bytes(60 << 20)},
    time={"compute": Seconds(0.4), "communication": Seconds(0.1)},
    error=0.3,
)


def step_metrics(step: int, *, loss: float, seconds: float = 0.5) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        grad_norm=0.75,
        lr=1e-3,
        tokens=1024,
        samples=4,
        step_seconds=seconds,
        mfu=0.2,
        peak_bytes=110 << 20,
        phases={"data": 0.0, "forward": seconds / 4, "backward": seconds / 2, "optimizer": seconds / 4},
        time=1000.0 + step,
    )


def new_run(path: Path, *, world_size: int = 2, steps: int = 10) -> RunDirectory:
    recipe = parse_recipe("name: toy", name="test", overrides=[f"train.steps={steps}"])
    return create_run(path, recipe, Plan(mesh=Mesh(dp_replicate=world_size), micro_batch=2, prediction=PREDICTION))


def start_ranks(run: RunDirectory, *, world_size: int = 2) -> None:
    for rank in range(world_size):
        with Journal(run, rank) as journal:
            where = {"host": platform.node(), "pid": os.getpid(), "device": "cpu", "version": "0"}
            journal.event("start", world_size=world_size, **where)
            journal.event("ready", seconds=1.0)


def finished_run(path: Path, *, text: str = "def first(self):\n    return 1") -> RunDirectory:
    """Return a run of ten steps whose loss falls from 5 to 0.5, evaluated, sampled and saved."""
    run = new_run(path)
    start_ranks(run)
    with Journal(run, 0) as journal:
        for step in range(1, 11):
            journal.step(step_metrics(step, loss=5.0 - 0.5 * (step - 1), seconds=3.0 if step == 1 else 0.5))
        journal.event("evaluation", step=10, loss=0.625, tokens=1024)
        journal.event("sample", step=10, prompt="def ", text=text)
        journal.event("saved", step=10, path=str(run.model), seconds=0.1)
        journal.event("done", step=10, steps=10, seconds=12.0)
    return run
