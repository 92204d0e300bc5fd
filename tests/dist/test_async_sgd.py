"""Asynchronous workers and their parameter server: real ranks, from staleness 0 to a worker that is far behind."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import slow
from tests.environment import CACHE
from tests.parity import Trajectory, assert_same_trajectory, plan_for, train_trajectory, trajectory_of
from tests.ranks import run_ranks
from trimaran.core import EXIT_AGAIN, EXIT_STUCK, Plan, Recipe
from trimaran.data import StepBatch
from trimaran.nets import Network
from trimaran.runs import RunDirectory, create_run
from trimaran.train import AsyncStepper, PlainStepper, build, read_rank_info, run_worker

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64}
STALENESS = 4
PATIENCE_SECONDS = 90.0


def recipe_with(*, steps: int = 12, faults: dict[str, Any] | None = None, **train: Any) -> Recipe:
    tree = {"steps": steps, "global_batch": 12, "lr": 3e-3, "seed": 3, "sample": {"tokens": 0},
            "evaluate": {"batches": 1}, "schedule": {"warmup_steps": 2}}  # fmt: skip
    model = {"preset": "tiny", "shape": SHAPE}
    sections = {"model": model, "data": {"seq_len": 32}, "train": tree | train, "faults": faults or {}}
    return Recipe.model_validate(sections | {"checkpoint": {"every": 0, "memory": 0}})


def async_plan(recipe: Recipe, *, workers: int = 2, grad_accum: int = 1, **settings: int) -> Plan:
    plan = plan_for(recipe, grad_accum=grad_accum, dp_replicate=workers)
    return Plan.model_validate(plan.model_dump() | {"engine": "async", "comm": {"async_sgd": settings}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Trajectory:
    """The trajectory of two replicas that wait for each other."""
    (runs := tmp_path_factory.mktemp("synchronous") / "runs").mkdir()
    return train_trajectory(recipe_with(), plan_for(recipe_with(), grad_accum=1, dp_replicate=2), runs)


def plain_rank(path: Path, cache: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)


def start(folder: Path, recipe: Recipe, plan: Plan, rank: Callable[..., Any] = plain_rank) -> RunDirectory:
    """Train in forked ranks, each of which runs `rank`, and return the run; it must end well."""
    run = create_run(folder / str(len(list(folder.iterdir()))), recipe, plan)
    codes = run_ranks(plan.mesh.world_size, rank, run.path, CACHE)
    assert codes == [0] * plan.mesh.world_size, run.events(0).read_text()
    return run


def lines_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.mark.parametrize(("workers", "grad_accum"), [(2, 1), slow((2, 2)), slow((3, 1))])
def test_without_staleness_it_is_synchronous_training(
    workers: int, grad_accum: int, folder: Path, synchronous: Trajectory
) -> None:
    recipe = recipe_with()
    plan = async_plan(recipe, workers=workers, grad_accum=grad_accum, staleness=0, pause_every=5)
    run = start(folder, recipe, plan)
    assert_same_trajectory(trajectory_of(run), synchronous)
    lines = lines_of(run)
    assert all(line["async_sgd"]["max_staleness"] == 0 for line in lines)
    assert all(line["tokens"] == 12 * 32 and line["samples"] == 12 for line in lines)
    assert all(sum(line["phases"].values()) == pytest.approx(line["step_seconds"], abs=1e-4) for line in lines)


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    began = time.monotonic()
    while not is_true():
        assert time.monotonic() - began < PATIENCE_SECONDS, f"waited too long: {what}"
        time.sleep(0.01)


def one_worker_is_behind(path: Path, cache: Path) -> int:
    """Run a rank. The first batch of rank 1 takes as long as rank 0 needs to get as far ahead as it may.

    Each rank writes a file for each batch when it begins, with its samples, and another when it is done.
    """
    rank, notes = int(os.environ["RANK"]), path / "notes"
    notes.mkdir(exist_ok=True)
    add, clear = AsyncStepper.add_gradients, AsyncStepper.clear_gradients
    numbers = list[int]()

    def noted(self: AsyncStepper) -> None:  # after the gradient is sent
        clear(self)
        (notes / f"done-{rank}-{numbers[-1]}").touch()

    def delayed(self: AsyncStepper, batch: StepBatch, report_progress: Callable[[], None]) -> torch.Tensor:
        is_first = not numbers
        numbers.append(batch.step)
        (notes / f"begun-{rank}-{batch.step}").write_text(json.dumps(batch.sample_ids))
        if is_first and rank == 0:
            wait_until(lambda: any(notes.glob("begun-1-*")), "rank 1 begins, too, with the same weights")
        if is_first and rank == 1:
            most_ahead = 2 * STALENESS + 1  # with its own batch, these are STALENESS + 1 updates
            wait_until(lambda: len([*notes.glob("done-0-*")]) == most_ahead, "rank 0 runs ahead")
        return add(self, batch, report_progress)

    AsyncStepper.add_gradients, AsyncStepper.clear_gradients = delayed, noted  # this process is a rank of its own
    return plain_rank(path, cache)


def test_a_slow_worker_holds_up_nobody_before_the_bound_and_no_sample_is_lost(folder: Path) -> None:
    recipe = recipe_with(steps=12)
    run = start(folder, recipe, async_plan(recipe, staleness=STALENESS), one_worker_is_behind)
    begun = [each.name.split("-") for each in (run.path / "notes").glob("begun-*")]
    assert sorted(int(number) for _, _, number in begun) == [*range(24)], "each batch once, by either worker"
    samples = [sample for each in (run.path / "notes").glob("begun-*") for sample in json.loads(each.read_text())]
    assert len(samples) == len({*samples}) == 12 * 12
    details = [line["async_sgd"] for line in lines_of(run)]
    assert max(each["max_staleness"] for each in details) == STALENESS, "rank 0 got as far ahead as it may, and no more"
    assert all(sum(each["batches"].values()) == 2 for each in details)
    assert details[0]["batches"] == {"0": 2}, "the first update did not wait for rank 1"
    assert [line["step"] for line in lines_of(run)] == [*range(1, 13)]


def stopped_in_the_middle(path: Path, cache: Path) -> int:
    """Run a rank that is asked to stop when it begins a batch of the sixth step or a later one."""
    add, step = AsyncStepper.add_gradients, PlainStepper.step

    def stopping(self: AsyncStepper, batch: StepBatch, report_progress: Callable[[], None]) -> torch.Tensor:
        if batch.step >= 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return add(self, batch, report_progress)

    def stopping_step(self: Any, batch: StepBatch, **options: Any) -> torch.Tensor:
        if batch.step >= 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, **options)

    AsyncStepper.add_gradients, PlainStepper.step = stopping, stopping_step
    return plain_rank(path, cache)


def stopped_run(folder: Path, recipe: Recipe, plan: Plan) -> RunDirectory:
    run = create_run(folder / str(len(list(folder.iterdir()))), recipe, plan)
    assert run_ranks(2, stopped_in_the_middle, run.path, CACHE) == [EXIT_AGAIN] * 2
    (checkpoint,) = run.checkpoints.glob("step-*")
    assert 6 <= int(checkpoint.name.removeprefix("step-")) < 12
    return run


@pytest.mark.parametrize("first", ["async", slow("torch")])
def test_a_stopped_run_resumes_where_it_was_and_under_the_other_engine(
    first: str, folder: Path, synchronous: Trajectory
) -> None:
    recipe = recipe_with()
    plans = async_plan(recipe, staleness=0), plan_for(recipe, grad_accum=1, dp_replicate=2)
    before, after = plans if first == "async" else reversed(plans)
    run = stopped_run(folder, recipe, before)
    other = create_run(folder / "other", recipe, after)
    shutil.copytree(run.checkpoints, other.checkpoints)
    shutil.copy(run.metrics, other.metrics)
    for each in (run, other):
        assert run_ranks(2, plain_rank, each.path, CACHE) == [0, 0], each.events(0).read_text()
        assert_same_trajectory(trajectory_of(each), synchronous)


def one_gradient_is_not_finite(path: Path, cache: Path) -> int:
    """Run a rank whose gradient is NaN in batch 9."""
    add, build_networks, numbers = AsyncStepper.add_gradients, build.build_networks, [0]

    def noted(self: AsyncStepper, batch: StepBatch, report_progress: Callable[[], None]) -> torch.Tensor:
        numbers[0] = batch.step
        return add(self, batch, report_progress)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.nan if numbers[0] == 9 else gradient

    def with_hook(*args: Any) -> tuple[Network, ...]:
        networks = build_networks(*args)
        next(networks[0].module.parameters()).register_hook(spoil)
        return networks

    AsyncStepper.add_gradients = noted
    build.build_networks = with_hook  # pyrefly: ignore[bad-assignment]
    return plain_rank(path, cache)


def test_an_update_that_is_not_finite_is_skipped_on_all_servers(folder: Path) -> None:
    recipe = recipe_with(steps=8)
    run = start(folder, recipe, async_plan(recipe, staleness=1), one_gradient_is_not_finite)
    (skipped,) = [line["step"] for line in lines_of(run) if line.get("skipped")]
    assert 5 <= skipped <= 6, "batch 9 is of the fifth step, and at most one update late"
    assert all(torch.isfinite(each).all() for each in trajectory_of(run).weights.values())
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    (skip,) = [each for each in events if each["kind"] == "skip"]
    assert len(skip["data"]["sample_ids"]) == 12


@pytest.mark.slow
def test_a_run_that_may_not_skip_stops_at_a_pause(folder: Path) -> None:
    recipe = recipe_with(faults={"not_finite": "stop"})
    run = create_run(folder / "0", recipe, async_plan(recipe, staleness=1))
    codes = run_ranks(2, one_gradient_is_not_finite, run.path, CACHE)
    assert codes == [EXIT_STUCK] * 2
