"""What Trimaran costs over a hand-written loop: the same decoder, data and optimizer on one device.

The two take turns, a step each, in one process, so that whatever the machine does meanwhile meets both; printed is the
median of the ratios of neighbouring steps: `python benchmarks/overhead.py [--steps 100] [--preset tiny] [--json]`, on a
GPU where there is one. A step of ours is everything between two batches, loading and the journal included. The peer is
`HandWritten` below: plain PyTorch and nothing but what any training script does.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from trimaran.core import Plan, Recipe
from trimaran.data import cache_folder
from trimaran.data.batch import StepBatch
from trimaran.data.loader import Loader
from trimaran.data.sequences import Sequences, split
from trimaran.hardware import parse_cluster
from trimaran.models import spec_of
from trimaran.nets import Decoder, initialise
from trimaran.planner import choose
from trimaran.telemetry import Journal, create_run
from trimaran.train.assemble import build_crew
from trimaran.train.place import join, place_of
from trimaran.train.schedule import learning_rate

WARM_UP = 5


class HandWritten:
    """A training script's loop, one step at a call."""

    def __init__(self, recipe: Recipe, plan: Plan, sequences: Sequences, device: torch.device) -> None:
        spec = spec_of(recipe.model)
        self.recipe, self.plan, self.sequences, self.device = recipe, plan, sequences, device
        self.model = Decoder(spec).to(device)
        initialise(self.model, seed=recipe.train.seed, spec=spec)
        if plan.compile:
            for layer in self.model.layers:
                layer.compile()
        matrices = [each for each in self.model.parameters() if each.ndim >= 2]
        vectors = [each for each in self.model.parameters() if each.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.train.lr, betas=(0.9, 0.95), fused=True)
        self.draw = torch.Generator().manual_seed(0)
        self.number = 0

    def step(self) -> float:
        chosen = torch.randint(len(self.sequences), (self.recipe.train.global_batch,), generator=self.draw)
        rows = [self.sequences[int(each)] for each in chosen]
        tokens = torch.stack([torch.from_numpy(row.tokens) for row in rows]).to(self.device)
        labels = torch.stack([torch.from_numpy(row.labels) for row in rows]).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.plan.precision == "bf16"):
            logits, _ = self.model(tokens=tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.number, self.recipe.train)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        return loss.item()


class TakingTurns:
    """A loader that lets the peer take a step before each of the trainer's, and times both."""

    def __init__(self, loader: Loader, peer: HandWritten) -> None:
        self.loader, self.peer = loader, peer
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def __iter__(self) -> Iterator[StepBatch]:
        began = self.now()
        for batch in self.loader:
            loaded = self.now()
            self.peer.step()
            resumed = self.now()
            yield batch
            ended = self.now()
            self.theirs.append(resumed - loaded)
            self.ours.append((loaded - began) + (ended - resumed))
            began = ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def now(self) -> float:
        if self.peer.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def plan_of(recipe: Recipe) -> Plan:
    """Return the plan for one device that takes the global batch in one micro-batch."""
    cluster = parse_cluster("1xH200" if torch.cuda.is_available() else "1xcpu")
    whole = recipe.model_copy(update={"plan": Plan(micro_batch=recipe.train.global_batch)})
    return choose(whole, spec_of(recipe.model), cluster)


def measure(recipe: Recipe, folder: Path) -> TakingTurns:
    run, place = create_run(folder, recipe, plan_of(recipe)), place_of({})
    join(place)
    with Journal(run, 0) as journal:
        crew = build_crew(run, place, journal, cache=cache_folder(os.environ))
        training, _ = split(crew.shards, recipe.data)
        peer = HandWritten(recipe, crew.trainer.plan, training, place.device)
        with crew.trainer.loader_from(0) as loader:
            turns = TakingTurns(loader, peer)
            crew.trainer.loader_from = lambda start: nullcontext(turns)
            crew.trainer.train(crew.trainer.keeper.resume())
    dist.destroy_process_group()
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe.model_validate(
        {
            "model": {"preset": options.preset},
            "data": {"seq_len": options.seq_len},
            "train": {"steps": options.steps, "global_batch": options.batch},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        turns = measure(recipe, Path(folder) / "run")
    ours, theirs = turns.ours[WARM_UP:], turns.theirs[WARM_UP:]
    result = {
        "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 4),
        "trimaran_step_ms": round(1000 * statistics.median(ours), 2),
        "hand_written_step_ms": round(1000 * statistics.median(theirs), 2),
        "steps": len(ours),
        "torch": torch.__version__,
        "device": str(turns.peer.device),
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(f"Trimaran {result['trimaran_step_ms']} ms a step, hand-written loop {result['hand_written_step_ms']} ms")
        print(
            f"ratio {result['ratio']}: {len(ours)} steps of each in turn, torch {torch.__version__}, {result['device']}"
        )


if __name__ == "__main__":
    main()
