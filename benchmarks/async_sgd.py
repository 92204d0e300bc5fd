"""Compares asynchronous with synchronous training at equal wall-clock time, with one worker slower than the others.

usage: python benchmarks/async_sgd.py [--seconds 60] [--slowdowns 1,4] [--staleness 4] [--workers 2] [--seeds 0]
                                    [--lr 1e-3]

Every arm is the real trainer on the text of the default recipe, in one process for each worker on this machine. The
last worker sleeps after each forward, so that a micro-batch takes it `slowdown` times as long. Evaluation is as usual.
The learning rate is constant after the warm-up, since how many steps fit is not known before. The time starts with the
first step and includes evaluations. Printed are updates and the last held-out loss within each quarter of the time, and
the mean and largest staleness.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.parity import plan_for
from tests.ranks import run_ranks

from trimaran.core import EXIT_AGAIN, Plan, Recipe
from trimaran.runs import RunDirectory, create_run
from trimaran.train.process.rank_setup import read_rank_info
from trimaran.train.steppers.stepper import PlainStepper
from trimaran.train.worker import run_worker

SHAPE = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 256}
BACKWARD_PER_FORWARD = 2.0  # backward takes about twice as long as forward
MAX_STEPS = 1_000_000


def recipe_of(seed: int, lr: float) -> Recipe:
    """Return a model that a CPU core trains at some ten micro-batches a second."""
    train = {"steps": MAX_STEPS, "global_batch": 16, "lr": lr, "seed": seed, "save": False, "sample": {"tokens": 0},
             "evaluate": {"every": 10, "batches": 4}, "schedule": {"kind": "constant", "warmup_steps": 20}}  # fmt: skip
    sections = {"model": {"preset": "tiny", "shape": SHAPE}, "data": {"seq_len": 128, "holdout": 0.02}, "train": train}
    return Recipe.model_validate(sections | {"checkpoint": {"every": "off", "memory": 0}})


def slowed_rank(path: Path, cache: Path, slowdown: float, seconds: float) -> int:
    """Run a rank; the last one is slowed. Rank 0 asks for a stop after `seconds` of training."""
    rank_info = read_rank_info(os.environ)
    run, forward = RunDirectory(path), PlainStepper._forward

    def slowed(self: PlainStepper, inputs: Any) -> Any:
        began = time.perf_counter()
        result = forward(self, inputs)
        time.sleep((slowdown - 1) * (1 + BACKWARD_PER_FORWARD) * (time.perf_counter() - began))
        return result

    def stop_later() -> None:
        while not run.metrics.exists() or not run.metrics.stat().st_size:
            time.sleep(0.05)
        time.sleep(seconds)
        run.stop_request.touch()

    if rank_info.rank == rank_info.world_size - 1 and slowdown > 1:
        PlainStepper._forward = slowed
    if rank_info.rank == 0:
        threading.Thread(target=stop_later, daemon=True).start()
    return run_worker(run, rank_info, cache=cache)


def train(recipe: Recipe, plan: Plan, *, slowdown: float, seconds: float, folder: Path) -> dict[str, Any]:
    """Train for some seconds; return the held-out losses with their times, and the numbers of the lines."""
    run = create_run(folder / str(len(list(folder.iterdir()))), recipe, plan)
    arguments = run.path, folder.parent / "cache", slowdown, seconds
    codes = run_ranks(plan.mesh.world_size, slowed_rank, *arguments, timeout=seconds + 300)
    assert set(codes) == {EXIT_AGAIN}, codes
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    began = lines[0]["time"]
    losses = [(each["time"] - began, each["data"]["loss"]) for each in events if each["kind"] == "evaluation"]
    in_time = [line for line in lines if line["time"] <= began + seconds]
    details = [line["async_sgd"] for line in in_time if "async_sgd" in line]
    marks = [seconds * quarter / 4 for quarter in (1, 2, 3, 4)]
    return {
        "updates": len(in_time),
        "held_out": [next((loss for at, loss in reversed(losses) if at <= mark), None) for mark in marks],
        "staleness": round(statistics.fmean(each["staleness"] for each in details), 2) if details else 0,
        "max_staleness": max((each["max_staleness"] for each in details), default=0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--slowdowns", default="1,4")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "runs"
        folder.mkdir()
        for seed in map(int, options.seeds.split(",")):
            recipe = recipe_of(seed, options.lr)
            synchronous = plan_for(recipe, grad_accum=1, dp_replicate=options.workers)
            settings = {"engine": "async", "comm": {"async_sgd": {"staleness": options.staleness}}}
            plans = {"synchronous": synchronous, "async": Plan.model_validate(synchronous.model_dump() | settings)}
            for slowdown in map(float, options.slowdowns.split(",")):
                for arm, plan in plans.items():
                    found = train(recipe, plan, slowdown=slowdown, seconds=options.seconds, folder=folder)
                    print(json.dumps({"seed": seed, "slowdown": slowdown, "arm": arm} | found), flush=True)


if __name__ == "__main__":
    main()
