"""A toy that is kept as a run is: its state is known after every step, and forked ranks sail it to where they die."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.runs import step_metrics
from trimaran.checkpoint.durable import DurableDisk
from trimaran.checkpoint.memory_copies import Label, MemorySlot
from trimaran.checkpoint.tensor_regions import Index
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.core import Mesh, Plan, UserError, parse_recipe
from trimaran.run import Journal, RunDirectory, create_run
from trimaran.train.agreement import Agreed, Ending
from trimaran.train.checkpointing.checkpointer import Checkpointer
from trimaran.train.process.rank_info import read_rank_info
from trimaran.train.process.supervisor_link import SupervisorLink

ROWS = 12
DIED = "died without a word|onnection (closed|reset) by peer"  # whoever is heard first: who did, or who noticed


class ToyState:
    """Weights split over the ranks by rows, and a bias that all have. A step is a function of its number."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rows = range(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
        self.weight = torch.zeros(len(self.rows), 400)
        self.bias = torch.zeros(7)
        self.frozen = torch.arange(5.0)
        self.seen: list[int] = []
        start, shape = (self.rows.start, 0), (ROWS, 400)
        self._pieces = [
            TensorShard(key="model/weight", tensor=self.weight, shape=shape, start=start),
            TensorShard(key="model/bias", tensor=self.bias, shape=(7,), start=(0,)),
            TensorShard(key="model/frozen", tensor=self.frozen, shape=(5,), start=(0,), frozen=True),
        ]

    def step(self, number: int) -> None:
        self.weight += torch.outer(torch.tensor([*self.rows]) + 1.0, torch.full((400,), 0.5 + number))
        self.bias += number
        self.seen.append(number)

    def is_after(self, number: int) -> bool:
        """Return whether the state is that after `number` steps, bit by bit."""
        other = ToyState(0, 1)
        for step in range(number):
            other.step(step)
        mine = other.weight[self.rows.start : self.rows.stop]
        return torch.equal(mine, self.weight) and torch.equal(other.bias, self.bias) and self.seen == other.seen

    def pieces(self) -> list[TensorShard]:
        return self._pieces

    def pieces_from(self, index: Index) -> list[TensorShard]:
        return self._pieces

    def gather(self) -> None: ...

    def progress(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def restore(self, progress: Mapping[str, Any]) -> None:
        self.seen = list(progress["seen"])


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A stretch to sail: up to step `to`, and what goes wrong on the way on rank `who`."""

    to: int
    attempt: int = 0
    term: int = 0
    rank_memories: tuple[int, ...] = ()
    who: int = -1
    die_after: int = -1
    die_sealing: int = -1
    die_writing: int = -1
    slow_disk: float = 0.0
    full_disk: int = -1
    not_finite: int = -1
    rewind: tuple[int, int] | None = None
    nodes: bool = False
    finish: bool = True


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a rank has to tell."""

    start: int
    is_right: bool
    error: str = ""
    saves: list[float] = field(default_factory=list)


def sail(path: Path, leg: Leg) -> Log:
    """Train the toy as the worker would, from the newest state on."""
    if leg.nodes:
        os.environ["LOCAL_RANK"] = "0"
    place = read_rank_info(os.environ)
    dist.init_process_group("gloo")
    state = ToyState(place.rank, place.world_size)
    rank_memories = leg.rank_memories[place.rank : place.rank + 1] if leg.nodes else leg.rank_memories
    link = SupervisorLink(attempt=leg.attempt, term=leg.term, place=place.local_rank, rank_memories=rank_memories)
    if place.rank == leg.who:
        sabotage(leg)
    with Journal(RunDirectory(path), place.rank, attempt=leg.attempt) as journal:
        checkpointer = Checkpointer(RunDirectory(path), place, journal, link, state)
        start = done = checkpointer.resume()
        while done < leg.to:
            assert state.is_after(done)
            journal.resume(done)
            done = stretch(leg, checkpointer, state, journal, done)
            if leg.rewind and done == leg.rewind[0]:
                back = checkpointer.rewind(Ending(step=leg.rewind[1], reason="rewind"))
                if back is None:
                    return Log(start=start, is_right=False, error="nowhere to go")
                leg, done = replace(leg, rewind=None), back
        error = ""
        try:
            if leg.finish:
                checkpointer.finish(done)
        except UserError as mistake:
            error = f"{mistake.code} {mistake.what}"
        return Log(start=start, is_right=state.is_after(done), error=error, saves=list(checkpointer.totals().values()))


def stretch(leg: Leg, checkpointer: Checkpointer, state: ToyState, journal: Journal, start: int) -> int:
    """Sail to the end, or to where to go back from, and return the step. Metrics come a step late, as in training."""
    agreed, end = Agreed(), leg.rewind[0] if leg.rewind else leg.to
    for done in range(start + 1, end + 1):
        wishes = torch.tensor([int(checkpointer.wants_save)])
        dist.all_reduce(wishes)
        checkpointer.before_update()
        state.step(done - 1)
        if done == leg.not_finite and journal.rank == leg.who:
            state.weight[0, 0] = float("nan")
        if done > start + 1:
            journal.step(step_metrics(done - 1, loss=1.0))
        checkpointer.after_step(done, agreed)
        agreed = Agreed(save=bool(wishes))
        if done == leg.die_after and journal.rank == leg.who:
            os._exit(9)
        if leg.slow_disk:
            time.sleep(0.002)
        else:  # a step of the toy is quicker than any disk
            checkpointer._backend.saver.wait()
    journal.step(step_metrics(end, loss=1.0))
    return end


def sabotage(leg: Leg) -> None:
    seal, write = MemorySlot.seal, DurableDisk.write

    def sealing(slot: MemorySlot, label: Label, items: bytes, num_bytes: int) -> None:
        if label.step == leg.die_sealing:
            os._exit(9)
        seal(slot, label, items, num_bytes)

    def writing(disk: DurableDisk, fd: int, data: memoryview) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if leg.die_writing >= 0 and f"step-{leg.die_writing:08d}" in name:
            os._exit(9)
        if leg.full_disk >= 0 and f"step-{leg.full_disk:08d}" in name:
            raise OSError(28, "No space left on device", name)
        time.sleep(leg.slow_disk)
        write(disk, fd, data)

    MemorySlot.seal, DurableDisk.write = sealing, writing  # type: ignore[method-assign]


def new_run(folder: Path, *overrides: str) -> RunDirectory:
    recipe = parse_recipe("name: toy", name="test", overrides=["train.steps=1000", *overrides])
    return create_run(folder / "run", recipe, Plan(mesh=Mesh(dp_replicate=2), micro_batch=16))


def events(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return [line["data"] | {"step": line["step"]} for line in lines if line["kind"] == kind]


def told_steps(run: RunDirectory) -> list[int]:
    """Return the steps that there are metrics of."""
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


def killed(run: RunDirectory, leg: Leg) -> None:
    with pytest.raises(AssertionError, match=DIED):
        run_ranks(2, sail, run.path, leg)
