"""Runs whose plan changes after given steps, with the real worker in forked ranks."""

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from tests.matrix import SHAPE
from tests.ranks import run_ranks
from tests.resume import HeldShard, SavedState, bits, share_of
from trimaran.core import Plan, Recipe
from trimaran.run import RunDirectory, create_run
from trimaran.run.change_request import change_answers, write_change_request
from trimaran.train.change import apply_change, change_file
from trimaran.train.process.rank_info import read_rank_info
from trimaran.train.process.supervisor_link import SupervisorLink
from trimaran.train.worker import run_worker

Patch = Mapping[str, Any]


def change_recipe(*, steps: int, layers: int = 3, **sections: Any) -> Recipe:
    """Return the recipe of a small decoder; the run saves no checkpoint but the last."""
    tree = {
        "model": {"preset": "tiny", "shape": SHAPE | {"layers": layers}},
        "data": {"seq_len": 16},
        "train": {"steps": steps, "global_batch": 16, "seed": 3, "schedule": {"warmup_steps": 2}},
        "checkpoint": {"every": 0},
    }
    return Recipe.model_validate({name: tree.get(name, {}) | sections.get(name, {}) for name in {**tree, **sections}})


@dataclass(frozen=True)
class HandOver:
    """The state of all ranks before and after one change."""

    before: SavedState
    after: SavedState

    def assert_equal(self) -> None:
        """Fail unless every tensor and counter is the same, bit for bit."""
        assert self.before.index.keys() == self.after.index.keys()
        for key in self.before.index:
            assert torch.equal(bits(self.before.full_tensor(key)), bits(self.after.full_tensor(key))), key
        assert self.before.progress == self.after.progress


@dataclass(frozen=True)
class ChangedTraining:
    """A run after its end: the answers to its changes, what was handed over, and what is left in the processes."""

    run: RunDirectory
    answers: list[dict[str, Any]]
    hand_overs: list[HandOver]
    leftovers: list[dict[str, list[int]]]  # of each rank, after each change: groups, threads, descriptors


def train_with_changes(
    recipe: Recipe,
    plan: Plan,
    folder: Path,
    changes: Mapping[int, Patch],
    *,
    inject: Callable[[], None] = lambda: None,
    shares_memory: bool = False,
) -> ChangedTraining:
    """Train under `plan`, and request each patch after its step. `inject` is called in every rank before it starts.

    `shares_memory`: ranks can read each other's copies of the state, as under a supervisor.
    """
    run = create_run(folder / str(len(list(folder.iterdir()))), recipe, plan)
    size, cache = plan.mesh.world_size, folder.parent / "cache"
    fds = tuple(os.memfd_create("rank-memory") for _ in range(size)) if shares_memory else ()
    results = run_ranks(size, _worker, run.path, cache, dict(changes), inject, fds, timeout=400.0)
    for fd in fds:
        os.close(fd)
    codes, records, leftovers = zip(*results, strict=True)
    assert codes == (0,) * plan.mesh.world_size, run.events(0).read_text()
    hand_overs = [HandOver(*(_saved([rank[number][at] for rank in records]) for at in (0, 1)))
                  for number in range(len(records[0]))]  # fmt: skip
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, recipe.train.steps + 1)), "every step once, in order"
    assert not run.change_request.exists()
    return ChangedTraining(run, [event["data"] for event in change_answers(run)], hand_overs, list(leftovers))


def _saved(rows: list[tuple[list[HeldShard], dict[str, Any]]]) -> SavedState:
    assert all(progress == rows[0][1] for _, progress in rows), "ranks differ in their progress"
    return SavedState(0, [shares for shares, _ in rows], rows[0][1])


def _worker(
    path: Path, cache: Path, changes: dict[int, Patch], inject: Callable[[], None], fds: tuple[int, ...]
) -> tuple[int, Any, Any]:
    run, records, leftovers = RunDirectory(path), [], dict[str, list[int]]()
    request_after(run, changes)
    _record_state(records, leftovers)
    inject()
    rank_info = read_rank_info(os.environ)
    link = SupervisorLink(rank_memories=fds, local_rank=rank_info.local_rank)
    code = run_worker(run, rank_info, cache=cache, link=link)
    return code, records, leftovers


def request_after(run: RunDirectory, changes: dict[int, Patch]) -> None:
    """Make rank 0 write each request after its step and after the change before it, and wait until it is checked."""
    is_requested = change_file.ChangeFile.is_requested

    def requested(self: change_file.ChangeFile, step: int) -> bool:
        if self._path and changes and step >= min(changes) and not self._is_taken:
            write_change_request(run, changes.pop(min(changes)))
            is_requested(self, step)
            if self._thread is not None:  # else it is refused already: the check was faster than this call
                self._thread.join()
        return is_requested(self, step)

    change_file.ChangeFile.is_requested = requested  # type: ignore[method-assign]


def _record_state(records: list[Any], leftovers: dict[str, list[int]]) -> None:
    """Record the whole state before and after each change, and what the process has after it."""
    build, apply = apply_change.PlanChanger._build, apply_change.PlanChanger.apply

    def recorded_build(self: Any, context: Any, parts: Any, *args: Any, **options: Any) -> Any:
        before = _state_of(parts)
        new = build(self, context, parts, *args, **options)
        records.append((before, _state_of(new)))
        return new

    def recorded_apply(self: Any, *args: Any) -> Any:
        result = apply(self, *args)
        counts = {
            "groups": len(distributed_c10d._world.pg_map),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }
        for name, count in counts.items():
            leftovers.setdefault(name, []).append(count)
        return result

    apply_change.PlanChanger._build = recorded_build  # type: ignore[method-assign]
    apply_change.PlanChanger.apply = recorded_apply  # type: ignore[method-assign]


def _state_of(parts: Any) -> tuple[list[HeldShard], dict[str, Any]]:
    state = parts.trainer.checkpointer.state
    return share_of(state), state.progress()
