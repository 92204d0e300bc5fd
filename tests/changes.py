"""Runs whose plan changes after given steps, with the real worker in forked ranks."""

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.environment import CACHE
from tests.matrix import SHAPE
from tests.ranks import run_ranks
from tests.resume import HeldShard, SavedState, bits, share_of
from trimaran.core import Plan, Recipe
from trimaran.runs import RunDirectory, change_answers, create_run, write_change_request
from trimaran.train import ChangeFile, SupervisorLink, known_groups, read_rank_info, run_worker
from trimaran.train.features.live_change import apply_change, rebuild

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
    inject: Callable[[], None] | None = None,
    shares_memory: bool = False,
) -> ChangedTraining:
    """Train under `plan`, and request each patch after its step. `inject` is called in every rank before it starts.

    `shares_memory`: ranks can read each other's copies of the state, as under a supervisor.
    """
    run = create_run(folder / str(len(list(folder.iterdir()))), recipe, plan)
    size, cache = plan.mesh.world_size, CACHE
    fds = tuple(os.memfd_create("rank-memory") for _ in range(size)) if shares_memory else ()
    memories = tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in fds)
    results = run_ranks(size, _worker, run.path, cache, dict(changes), inject, memories, timeout=400.0)
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
    path: Path, cache: Path, changes: dict[int, Patch], inject: Callable[[], None] | None, memories: tuple[str, ...]
) -> tuple[int, Any, Any]:
    run, records, leftovers = RunDirectory(path), [], dict[str, list[int]]()
    request_after(run, changes)
    _record_state(records, leftovers)
    if inject is not None:
        inject()
    rank_info = read_rank_info(os.environ)
    fds = tuple(os.open(each, os.O_RDWR) for each in memories)
    link = SupervisorLink(rank_memories=fds, local_rank=rank_info.local_rank)
    code = run_worker(run, rank_info, cache=cache, link=link)
    return code, records, leftovers


def request_after(run: RunDirectory, changes: dict[int, Patch]) -> None:
    """Make rank 0 write each request after its step and after the answer to the one before.

    The run waits until the request is checked: otherwise the step at which it is applied would depend on the load.
    """
    if os.environ["RANK"] != "0":
        return
    is_requested, answer, pending = ChangeFile.is_requested, ChangeFile.answer, list[int]()

    def requested(self: ChangeFile, step: int) -> bool:
        if changes and not pending and step >= min(changes):
            pending.append(min(changes))
            write_change_request(run, changes.pop(pending[0]))
            is_requested(self, step)
            for thread in threading.enumerate():
                if thread.name == "trimaran-change":
                    thread.join()
        return is_requested(self, step)

    def answered(self: ChangeFile, *args: Any, **facts: Any) -> None:
        pending.clear()
        answer(self, *args, **facts)

    ChangeFile.is_requested, ChangeFile.answer = requested, answered  # type: ignore[method-assign]


def _record_state(records: list[Any], leftovers: dict[str, list[int]]) -> None:
    """Record the whole state before and after each change, and what the process has after it."""
    builders = rebuild.change_in_place, rebuild.rebuild_with_room
    apply = apply_change.PlanChanger.apply

    def recorded(build: Callable[..., Any]) -> Callable[..., Any]:
        def recorded_build(context: Any, parts: Any, *args: Any) -> Any:
            before = _state_of(parts)
            new = build(context, parts, *args)
            records.append((before, _state_of(new)))
            return new

        return recorded_build

    def recorded_apply(self: Any, *args: Any) -> Any:
        result = apply(self, *args)
        counts = {
            "groups": len(known_groups()),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }
        for name, count in counts.items():
            leftovers.setdefault(name, []).append(count)
        return result

    rebuild.change_in_place, rebuild.rebuild_with_room = map(recorded, builders)
    apply_change.PlanChanger.apply = recorded_apply  # type: ignore[method-assign]


def _state_of(parts: Any) -> tuple[list[HeldShard], dict[str, Any]]:
    state = parts.checkpoint.state
    return share_of(state), state.progress()
