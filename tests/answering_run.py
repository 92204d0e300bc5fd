"""A stand-in for the ranks of a run: a process that writes metrics and answers change requests, without training.

`python -m tests.answering_run RUN` writes a step every few milliseconds, until the run's stop file appears. The time of
a step is not that of the clock: it follows from the plan, by `FACTORS`, with a little noise.
"""

import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimaran.core import Plan, StepMetrics
from trimaran.runs import Journal, RunDirectory, dump_plan, read_change_request

STEP_SECONDS = 0.1
PAUSE_SECONDS = 0.01
# What a value does to the time of a step; values that are not named do nothing.
FACTORS: dict[tuple[str, Any], float] = {
    ("plan.micro_batch", 2): 0.8,
    ("plan.comm.bucket_mb", 1): 1.5,
    ("plan.recompute", "full"): 1.0,
}
REFUSED = ("plan.compile", True)


def step_seconds(patch: dict[str, Any], rng: random.Random) -> float:
    seconds = STEP_SECONDS * rng.gauss(1, 0.01)
    for pair in patch.items():
        seconds *= FACTORS.get(pair, 1.0)
    return seconds


def metrics(step: int, seconds: float) -> StepMetrics:
    parts = {"data": 0.0, "forward": 0.3, "backward": 0.6, "comm": 0.0, "optimizer": 0.1, "checkpoint": 0.0}
    phases = {name: part * seconds for name, part in parts.items()}
    return StepMetrics(step=step, loss=2.0, grad_norm=1.0, lr=0.1, tokens=100, samples=4, step_seconds=seconds, mfu=0.0,
                       peak_bytes=1000, phases=phases, time=time.time())  # fmt: skip


def answer(run: RunDirectory, journal: Journal, step: int, changed: dict[str, Any]) -> None:
    """Answer the pending request, as rank 0 does, and add its patch to `changed` if it is applied."""
    request = read_change_request(run)
    if request is None:
        return
    data = {"id": request.id, "patch": dict(request.patch), "by": request.by, "reason": request.reason}
    if REFUSED in request.patch.items():
        error = {"code": "P000", "what": "this cannot be", "fix": "leave it"}
        journal.event("change", step=step, **data, status="refused", how="in place", pause_seconds=0.0, error=error)
    else:
        changed |= request.patch
        replace_plan(run, request.patch)
        journal.event("change", step=step, **data, status="applied", how="in place", pause_seconds=PAUSE_SECONDS,
                      error=None)  # fmt: skip
    run.change_request.unlink()


def replace_plan(run: RunDirectory, patch: Mapping[str, Any]) -> None:
    tree = run.read_plan().model_dump()
    for field, value in patch.items():
        _, *path = field.split(".")
        here = tree
        for key in path[:-1]:
            here = here[key]
        here[path[-1]] = value
    draft = run.plan.with_name("draft")
    draft.write_text(dump_plan(Plan.model_validate(tree)))
    draft.replace(run.plan)


def main(path: Path, first: int = 1) -> None:
    run, rng, changed = RunDirectory(path), random.Random(0), {}
    with Journal(run, 0) as journal:
        step = first
        while not run.stop_request.exists():
            journal.step(metrics(step, step_seconds(changed, rng)))
            if run.change_request.exists():
                answer(run, journal, step, changed)
            step += 1
            time.sleep(0.004)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
