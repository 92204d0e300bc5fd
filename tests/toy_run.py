"""A toy run with a real checkpointer: its state after every step is known, and its forked ranks can be made to fail."""

import json
import os
import re
import threading
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
from trimaran.checkpoint import CopyMetadata, DurableDisk, MemorySlot, file_parts, memory_copies
from trimaran.core import Mesh, Plan, UserError, parse_recipe
from trimaran.parallel import TensorIndex, TensorShard
from trimaran.runs import Journal, RunDirectory, create_run
from trimaran.train import (
    Checkpointer,
    CheckpointInputs,
    LoopExit,
    RankInfo,
    StepDecision,
    SupervisorLink,
    read_rank_info,
)

ROWS = 12
DIED = "died without a result|onnection (closed|reset) by peer"  # from the dead rank or from its peer


class ToyState:
    """Weights sharded by rows, and a replicated bias. A step depends on its number only."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rows = range(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
        self.weight = torch.zeros(len(self.rows), 400)
        self.bias = torch.zeros(7)
        self.frozen = torch.arange(5.0)
        self.seen: list[int] = []
        start, shape = (self.rows.start, 0), (ROWS, 400)
        self._shards = [
            TensorShard(key="model/weight", tensor=self.weight, shape=shape, start=start),
            TensorShard(key="model/bias", tensor=self.bias, shape=(7,), start=(0,)),
            TensorShard(key="model/frozen", tensor=self.frozen, shape=(5,), start=(0,), frozen=True),
        ]

    def step(self, number: int) -> None:
        self.weight += torch.outer(torch.tensor([*self.rows]) + 1.0, torch.full((400,), 0.5 + number))
        self.bias += number
        self.seen.append(number)

    def is_after(self, number: int) -> bool:
        """Return whether the state is that after `number` steps, bit for bit."""
        other = ToyState(0, 1)
        for step in range(number):
            other.step(step)
        mine = other.weight[self.rows.start : self.rows.stop]
        return torch.equal(mine, self.weight) and torch.equal(other.bias, self.bias) and self.seen == other.seen

    def shards(self) -> list[TensorShard]:
        return self._shards

    def shards_from(self, index: TensorIndex) -> list[TensorShard]:
        return self._shards

    def gather(self) -> None: ...

    def progress(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def restore(self, progress: Mapping[str, Any]) -> None:
        self.seen = list(progress["seen"])


@dataclass(frozen=True, kw_only=True)
class ToyAttempt:
    """One attempt of the run: train up to step `to`, with faults on `faulty_rank`.

    `rank_memories` are descriptors of the process `owner`, which is that of the test. A checkpoint that `faulty_rank`
    writes takes `slow_disk` steps.
    """

    to: int
    number: int = 0
    term: int = 0
    owner: int = field(default_factory=os.getpid)
    rank_memories: tuple[int, ...] = ()
    part_bytes: int = file_parts.PART_BYTES
    has_memory: bool = True
    faulty_rank: int = -1
    die_after: int = -1
    die_committing: int = -1
    die_writing: int = -1
    slow_disk: int = 0
    full_disk: int = -1
    not_finite: int = -1
    rewind: tuple[int, int] | None = None
    nodes: bool = False
    finish: bool = True


@dataclass(frozen=True, kw_only=True)
class RankLog:
    """What a rank reports at the end. `saves` are the totals of its checkpointer."""

    start: int
    is_right: bool
    error: str = ""
    saves: list[float] = field(default_factory=list)


def run_attempt(path: Path, attempt: ToyAttempt) -> RankLog:
    """Train the toy as the worker would, from the newest state."""
    if attempt.nodes:
        os.environ["LOCAL_RANK"] = "0"
    rank_info = read_rank_info(os.environ)
    dist.init_process_group("gloo")
    state = ToyState(rank_info.rank, rank_info.world_size)
    link = link_to(attempt, rank_info)
    limit_memory(attempt)
    disk = SlowDisk(attempt.slow_disk)
    if rank_info.rank == attempt.faulty_rank:
        inject_faults(attempt, disk)
    with Journal(RunDirectory(path), rank_info.rank, attempt=attempt.number) as journal:
        run = RunDirectory(path)
        inputs = CheckpointInputs(
            run=run,
            rank_info=rank_info,
            journal=journal,
            link=link,
            state=state,
            recipe=run.read_recipe(),
            plan=run.read_plan(),
        )
        checkpointer = Checkpointer.resume(inputs)
        start = done = checkpointer.start
        while done < attempt.to:
            assert state.is_after(done)
            journal.resume(done)
            done = train_steps(attempt, checkpointer, state, journal, done, disk)
            if attempt.rewind and done == attempt.rewind[0]:
                back = checkpointer.rewind(LoopExit(step=attempt.rewind[1], reason="rewind"))
                if back is None:
                    return RankLog(start=start, is_right=False, error="no state")
                attempt, done = replace(attempt, rewind=None), back
        error = ""
        disk.stop()
        try:
            if attempt.finish:
                checkpointer.finish(done)
        except UserError as mistake:
            error = f"{mistake.code} {mistake.what}"
        return RankLog(
            start=start, is_right=state.is_after(done), error=error, saves=list(checkpointer.totals().values())
        )


def link_to(attempt: ToyAttempt, rank_info: RankInfo) -> SupervisorLink:
    """Return the link of a rank to the test, which owns the memory of the ranks as a supervisor does."""
    mine = slice(rank_info.rank, rank_info.rank + 1) if attempt.nodes else slice(None)
    paths = [f"/proc/{attempt.owner}/fd/{fd}" for fd in attempt.rank_memories[mine]]
    return SupervisorLink(
        attempt=attempt.number,
        term=attempt.term,
        local_rank=rank_info.local_rank,
        rank_memories=tuple(os.open(path, os.O_RDWR) for path in paths),
    )


def limit_memory(attempt: ToyAttempt) -> None:
    file_parts.PART_BYTES = attempt.part_bytes
    if not attempt.has_memory:
        memory_copies.MAX_FREE_MEMORY_FRACTION = 0.0


class SlowDisk:
    """Makes a checkpoint wait until its rank has trained `steps` more steps, or trains no more."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done, self._starts = steps, 0, dict[str, int]()
        self._changed = threading.Condition()

    def note_step(self) -> None:
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._steps = 0
            self._changed.notify_all()

    def wait(self, name: str) -> None:
        with self._changed:
            start = self._starts.setdefault(name, self._done)
            self._changed.wait_for(lambda: self._done >= start + self._steps)


def train_steps(
    attempt: ToyAttempt, checkpointer: Checkpointer, state: ToyState, journal: Journal, start: int, disk: SlowDisk
) -> int:
    """Train to the end, or to the rewind, and return the step. Metrics are logged one step late, as in training."""
    decision, end = StepDecision(), attempt.rewind[0] if attempt.rewind else attempt.to
    for done in range(start + 1, end + 1):
        wants_save = torch.tensor([int(checkpointer.wants_save)])
        dist.all_reduce(wants_save)
        checkpointer.before_update()
        state.step(done - 1)
        if done == attempt.not_finite and journal.rank == attempt.faulty_rank:
            state.weight[0, 0] = float("nan")
        if done > start + 1:
            journal.step(step_metrics(done - 1, loss=1.0))
        checkpointer.after_step(done, decision)
        decision = StepDecision(save=bool(wants_save))
        if done == attempt.die_after and journal.rank == attempt.faulty_rank:
            os._exit(9)
        disk.note_step()
        while checkpointer.is_saving and not attempt.slow_disk:  # a toy step is faster than any disk
            time.sleep(0.001)
    journal.step(step_metrics(end, loss=1.0))
    return end


def inject_faults(attempt: ToyAttempt, disk: SlowDisk) -> None:
    commit, write = MemorySlot.commit, DurableDisk.write

    def committing(slot: MemorySlot, metadata: CopyMetadata, items: bytes, num_bytes: int) -> None:
        if (metadata.step, metadata.incarnation[0]) == (attempt.die_committing, attempt.number):
            os._exit(9)
        commit(slot, metadata, items, num_bytes)

    def writing(durable: DurableDisk, fd: int, data: memoryview) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if attempt.die_writing >= 0 and f"step-{attempt.die_writing:08d}" in name:
            os._exit(9)
        if attempt.full_disk >= 0 and f"step-{attempt.full_disk:08d}" in name:
            raise OSError(28, "No space left on device", name)
        if step := re.search(r"step-\d+", name):
            disk.wait(step[0])
        write(durable, fd, data)

    MemorySlot.commit, DurableDisk.write = committing, writing  # type: ignore[method-assign]


def new_run(folder: Path, *overrides: str) -> RunDirectory:
    recipe = parse_recipe("name: toy", name="test", overrides=["train.steps=1000", *overrides])
    return create_run(folder / "run", recipe, Plan(mesh=Mesh(dp_replicate=2), micro_batch=16))


def events(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return [line["data"] | {"step": line["step"]} for line in lines if line["kind"] == kind]


def logged_steps(run: RunDirectory) -> list[int]:
    """Return the steps that have metrics."""
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


def run_until_killed(run: RunDirectory, attempt: ToyAttempt, *, ranks: int = 2) -> None:
    with pytest.raises(AssertionError, match=DIED):
        run_ranks(ranks, run_attempt, run.path, attempt)
