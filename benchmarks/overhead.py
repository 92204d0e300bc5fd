"""Overhead of Trimaran over a bare loop with the same network, loss, optimizer and batches on one device.

usage: python benchmarks/overhead.py [--steps 60] [--preset tiny] [--seq-len 256] [--batch 8] [--turn 4] [--json]

On a GPU the default is a 1B decoder with an untied head, 4 x 4096 tokens a step. The two alternate every few steps in
one process, so that disturbances of the machine affect both, and the device is synchronised only between turns. The
script prints the median ratio of adjacent turns, and the ratio of all turns together, which includes rare slow steps.
A step of ours is everything between two batches: loading, the journal, the guard and memory copies, as under a
supervisor. The peer is `BareLoop` below: only forward, backward, clip and update; its batches are already loaded.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trimaran.core import Plan, Recipe
from trimaran.data import cache_folder
from trimaran.data.loader import Loader
from trimaran.data.step_batch import StepBatch
from trimaran.machine import parse_cluster
from trimaran.models import spec_of
from trimaran.parallel import autocast, build_mesh
from trimaran.parallel.optimizer.build_optimizer import learning_rate
from trimaran.parallel.tensor_sums import gradient_norm
from trimaran.planner import choose
from trimaran.runs import Journal, RunDirectory, create_run
from trimaran.train.build import build_worker_parts
from trimaran.train.checkpointing.checkpointer import Checkpointer
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.process.rank_setup import RankInfo, join_process_group, read_rank_info
from trimaran.train.process.supervisor_link import SupervisorLink
from trimaran.train.rank_context import read_context
from trimaran.train.rank_networks import build_networks
from trimaran.train.steppers.engine import build_stepper
from trimaran.train.steppers.stepper import PlainStepper
from trimaran.train.steppers.update import multiply_gradients

WARM_STEPS = 16  # by then everything is compiled, and the cost of a memory copy is known
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"steps": 80, "preset": "llama-3.2-1b", "seq_len": 4096, "batch": 4, "turn": 4},
    "cpu": {"steps": 60, "preset": "tiny", "seq_len": 256, "batch": 8, "turn": 1},
}


class BareLoop:
    """The loop of a plain training script around the same parts, one step per call."""

    def __init__(self, recipe: Recipe, plan: Plan, rank_info: RankInfo) -> None:
        self.train, self.plan, self.device = recipe.train, plan, rank_info.device
        ranks = build_mesh(plan.mesh, device_type=rank_info.device.type)
        networks = build_networks(recipe, plan, rank_info, ranks)
        parts = build_stepper(networks, recipe.train, plan, ranks, StepClock(rank_info.device))
        assert isinstance(parts, PlainStepper)
        parts.set_training(True)
        self.judge, self.optimizer = parts._loss_function, parts.updater._optimizer
        self.parameters = [each for group in self.optimizer.param_groups for each in group["params"]]

    def step(self, host_batch: StepBatch) -> None:
        batch = host_batch.to(self.device)
        for index in range(self.plan.grad_accum):
            with autocast(self.plan, self.device):
                losses, balance = self.judge(batch.micro(index))
            ((losses.total + balance) / batch.num_valid).backward()
        factor = (self.train.clip_norm / (gradient_norm(self.parameters) + 1e-6)).clamp(max=1.0)
        if hasattr(self.optimizer, "factor"):
            self.optimizer.factor = factor  # applied in the same pass over the gradients
        else:
            multiply_gradients(self.parameters, factor)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(batch.step, self.train)
        self.optimizer.step()
        self.optimizer.zero_grad()


class TakingTurns:
    """A loader that runs the peer on the batches of a turn before the trainer gets them, and times both."""

    def __init__(self, loader: Loader, peer: BareLoop, turn: int) -> None:
        self.loader, self.peer, self.turn = loader, peer, turn
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def __iter__(self) -> Iterator[StepBatch]:
        batches, began = iter(self.loader), self.now()
        while turn := list(islice(batches, self.turn)):
            loaded = self.now()
            for batch in turn:
                self.peer.step(batch)
            resumed = self.now()
            yield from turn
            ended = self.now()
            self.theirs.append((resumed - loaded) / len(turn))
            self.ours.append((loaded - began + ended - resumed) / len(turn))
            began = ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def now(self) -> float:
        if self.peer.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def plan_of(recipe: Recipe) -> Plan:
    """Return the plan for one device with the global batch as one micro-batch."""
    cluster = parse_cluster("1xH200" if torch.cuda.is_available() else "1xcpu")
    pinned = recipe.model_copy(update={"plan": Plan(micro_batch=recipe.train.global_batch)})
    return choose(pinned, spec_of(recipe.model), cluster)


def measure(recipe: Recipe, folder: Path, turn: int) -> tuple[TakingTurns, RunDirectory]:
    run, rank_info = create_run(folder, recipe, plan_of(recipe)), read_rank_info({})
    join_process_group(rank_info)
    with Journal(run, 0) as journal:
        link = SupervisorLink(
            rank_memories=(os.memfd_create("rank-memory"),)
        )  # memory that a supervisor would own, so that memory copies are made
        agent = build_worker_parts(read_context(run, rank_info, journal, cache=cache_folder(os.environ), link=link))
        peer = BareLoop(recipe, run.read_plan(), rank_info)
        with agent.trainer.loader_from(0) as loader:
            turns = TakingTurns(loader, peer, turn)
            agent.trainer.loader_from = lambda start: nullcontext(turns)
            checkpointer = Checkpointer.resume(agent.checkpoint)
            agent.trainer.train(checkpointer, checkpointer.start)
    dist.destroy_process_group()
    return turns, run


def result_of(turns: TakingTurns, run: RunDirectory) -> dict[str, Any]:
    skipped = -(-WARM_STEPS // turns.turn)
    ours, theirs = turns.ours[skipped:], turns.theirs[skipped:]
    last = json.loads(run.metrics.read_text().splitlines()[-1])
    return {
        "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 4),
        "ratio_of_sums": round(sum(ours) / sum(theirs), 4),
        "trimaran_step_ms": round(1000 * statistics.median(ours), 2),
        "bare_step_ms": round(1000 * statistics.median(theirs), 2),
        "steps": len(ours) * turns.turn,
        "recompiles": last.get("recompiles", 0),
        "torch": torch.__version__,
        "device": str(turns.peer.device),
    }


def recipe_of(options: argparse.Namespace) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"preset": options.preset, "shape": {"tied": False}},
            "data": {"seq_len": options.seq_len},
            "train": {"steps": options.steps, "global_batch": options.batch},
        }
    )


def main() -> None:
    defaults = DEFAULTS["cuda" if torch.cuda.is_available() else "cpu"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=defaults["steps"])
    parser.add_argument("--preset", default=defaults["preset"])
    parser.add_argument("--seq-len", type=int, default=defaults["seq_len"])
    parser.add_argument("--batch", type=int, default=defaults["batch"])
    parser.add_argument("--turn", type=int, default=defaults["turn"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.steps < WARM_STEPS + 2 * options.turn:
        parser.error(f"--steps is at least {WARM_STEPS + 2 * options.turn}: the first {WARM_STEPS} are not counted")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = result_of(*measure(recipe_of(options), Path(folder) / "run", options.turn))
    if options.json:
        print(json.dumps(result))
        return
    print(f"Trimaran {result['trimaran_step_ms']} ms a step, bare loop {result['bare_step_ms']} ms")
    print(f"ratio {result['ratio']}, of all turns together {result['ratio_of_sums']}: {result['steps']} steps of each")
    print(f"recompiled after the warm-up {result['recompiles']}; torch {result['torch']}, {result['device']}")


if __name__ == "__main__":
    main()
