"""Profiles of complete runs: traces and memory snapshots at the same steps on all ranks, without effect on training."""

import json
import os
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import slow
from tests.environment import CACHE
from tests.parity import Trajectory, plan_for, train_run, train_trajectory, trajectory_of
from tests.ranks import run_ranks
from trimaran.core import Plan, Recipe
from trimaran.runs import (
    ProfileRequest,
    RunDirectory,
    Trace,
    create_run,
    find_traces,
    load_trace,
    merge,
    request_file,
    summarise,
    write_request,
)
from trimaran.train import PlainStepper, read_rank_info, run_worker
from trimaran.train.metrics import profiler

SHAPE = {"layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 32}


def recipe_of(steps: int = 6, **telemetry: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"preset": "tiny", "shape": SHAPE},
            "data": {"seq_len": 32},
            "train": {
                "steps": steps,
                "global_batch": 8,
                "seed": 3,
                "sample": {"tokens": 0},
                "evaluate": {"batches": 0},
            },
            "telemetry": telemetry,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("profile") / "runs"
    runs.mkdir()
    return runs


def work(path: Path, cache: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)


@cache
def plain_trajectory(folder: Path, plan: str) -> Trajectory:
    """Return the trajectory without a profile, under a plan in JSON."""
    return train_trajectory(recipe_of(), plan_for(recipe_of(), **json.loads(plan)), folder)


def run_with_request(folder: Path, name: str, request: ProfileRequest, recipe: Recipe, plan: Plan) -> RunDirectory:
    """Train with a request that exists from the first step on, and return the run."""
    run = create_run(folder / name, recipe, plan)
    write_request(run, request)
    world = plan.mesh.world_size
    assert run_ranks(world, work, run.path, CACHE, timeout=400.0) == [0] * world
    return run


def profile_events(run: RunDirectory, rank: int) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in run.events(rank).read_text().splitlines()]
    return [event["data"] for event in events if event["kind"] == "profile"]


def seconds_by_phase(trace: Trace, step: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for begin, end, phase, at in trace.host_phases:
        found[phase] = found.get(phase, 0.0) + ((end - begin) / 1e6 if at == step else 0.0)
    return found


@pytest.mark.parametrize(
    "degrees", [{"dp_replicate": 2}, slow({"pp": 2}), slow({"dp_shard": 2}), slow({"tp": 2})], ids=str
)
def test_the_steps_of_the_recipe_are_traced_on_every_rank_without_effect_on_training(
    folder: Path, degrees: dict[str, int]
) -> None:
    traced, accum = recipe_of(profile="2:4", profile_ranks="all"), 2 if "pp" in degrees else 1
    trajectory = plain_trajectory(folder, json.dumps({"grad_accum": accum} | degrees))
    run = train_run(traced, plan_for(traced, grad_accum=accum, **degrees), folder)
    same = trajectory_of(run)
    assert same.losses == trajectory.losses
    assert all(torch.equal(same.weights[name], weight) for name, weight in trajectory.weights.items())
    (step, paths), *others = find_traces(run).items()
    assert (step, [*paths], others) == (2, [0, 1], [])
    traces = [load_trace(path) for path in paths.values()]
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    seen = {at: seconds_by_phase(traces[0], at) for at in (2, 3)}
    errors = {  # of each phase in one of the steps: another program may run between the readings of the two clocks
        phase: min(abs(seen[at].get(phase, 0.0) - lines[at - 1]["phases"][phase]) for at in seen)
        for phase in lines[1]["phases"]
    }
    assert max(errors.values()) < 3e-3, errors
    found = summarise(traces[1])
    assert (found.rank, found.steps) == (1, (2, 3))
    assert any(span["name"] == "aten::mm" for span in traces[1].spans)
    assert found.rows[0].seconds > 0
    assert 0 < found.communication < found.seconds
    merged = merge(traces)["traceEvents"]
    assert {(event["pid"], event["args"]["step"]) for event in merged if event.get("cat") == "phase"} == {
        (rank, at) for rank in (0, 1) for at in (2, 3)
    }


def test_a_request_file_makes_all_ranks_trace_the_same_steps(folder: Path) -> None:
    recipe, request = recipe_of(steps=6), ProfileRequest(steps=2, ranks="all")
    run = run_with_request(folder, "asked", request, recipe, plan_for(recipe, dp_replicate=2, grad_accum=1))
    (step, paths), *others = find_traces(run).items()
    assert ([*paths], others) == ([0, 1], [])
    for rank in (0, 1):
        expected = {
            "what": "trace",
            "path": f"profiles/step-{step:08d}-rank-{rank}.trace.json.gz",
            "request": request.id,
        }
        assert profile_events(run, rank) == [expected | {"first": step, "last": step + 1}]
    assert not request_file(run).exists()


def test_a_memory_snapshot_has_parameters_gradients_states_and_activations_by_module(folder: Path) -> None:
    recipe, request = recipe_of(steps=6), ProfileRequest(steps=1, ranks="1", memory=True)
    plan = plan_for(recipe, dp_replicate=2, grad_accum=1)
    run = run_with_request(folder, "memory", request, recipe, plan)
    assert profile_events(run, 0) == []
    (data,) = profile_events(run, 1)
    tree = json.loads((run.path / data["path"]).read_text())
    weights = trajectory_of(run).weights
    size = sum(weight.nbytes for weight in weights.values())
    assert tree["kinds"]["parameters"] == tree["within"]["kinds"]["gradients"] == size
    assert tree["kinds"]["states"] >= 2 * size
    layers = {row["module"] for row in tree["within"]["holders"] if row["kind"] == "activations"}
    assert {"layers.0", "layers.1"} <= layers
    hidden = 4 * 32 * SHAPE["hidden"] * 4  # of one micro-batch, in bytes
    assert tree["within"]["kinds"]["activations"] >= 2 * SHAPE["layers"] * hidden
    plain = plain_trajectory(folder, json.dumps({"grad_accum": 1, "dp_replicate": 2}))
    assert plain.losses == trajectory_of(run).losses


@pytest.mark.slow
def test_a_memory_snapshot_of_compiled_layers_causes_no_recompilation(folder: Path) -> None:
    recipe, request = recipe_of(steps=8), ProfileRequest(steps=2, memory=True)
    run = run_with_request(folder, "compiled", request, recipe, plan_for(recipe, grad_accum=1, compile=True))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    (data,) = profile_events(run, 0)
    assert "gradients" in json.loads((run.path / data["path"]).read_text())["within"]["kinds"]
    assert [line.get("recompiles", 0) for line in lines[data["first"] - 1 :]] == [0] * (9 - data["first"])
    assert lines[0]["compiles"] > 0


def test_a_rank_that_runs_out_of_memory_writes_a_memory_snapshot(folder: Path) -> None:
    recipe = recipe_of()
    run = create_run(folder / "oom", recipe, plan_for(recipe, grad_accum=1))
    assert run_ranks(1, work_until_memory_runs_out, run.path, CACHE) == [1]
    (data,) = profile_events(run, 0)
    tree = json.loads((run.path / data["path"]).read_text())
    assert (data["request"], tree["step"]) == ("oom", 3)
    assert "out of memory" in tree["oom"]["message"]
    assert tree["kinds"]["parameters"] > 0


def work_until_memory_runs_out(path: Path, cache: Path) -> int:
    step = PlainStepper.step
    calls = Counter[str]()

    def last(self: PlainStepper, *args: Any, **more: Any) -> torch.Tensor:
        calls["step"] += 1
        if calls["step"] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB (planted)")
        return step(self, *args, **more)

    PlainStepper.step = last  # type: ignore[method-assign]
    return work(path, cache)


def work_with_two_traces(path: Path, cache: Path) -> int:
    profiler.MAX_REPEATED_TRACES = 2  # pyrefly: ignore[bad-assignment]
    return work(path, cache)


def test_a_trace_is_repeated_and_only_the_newest_are_kept(folder: Path) -> None:
    recipe = recipe_of(steps=5, profile="1:2", profile_every=2)
    run = create_run(folder / "repeated", recipe, plan_for(recipe, grad_accum=1))
    assert run_ranks(1, work_with_two_traces, run.path, CACHE) == [0]
    traced = sorted(data["first"] for data in profile_events(run, 0))
    assert traced == [*range(1, recipe.train.steps + 1, 2)]
    assert [*find_traces(run)] == traced[-2:]


def test_a_profile_that_cannot_be_written_does_not_stop_training(folder: Path) -> None:
    recipe = recipe_of(profile="2:3")
    run = create_run(folder / "unwritable", recipe, plan_for(recipe, grad_accum=1))
    run.profiles.write_text("a file where a folder should be")
    assert run_ranks(1, work, run.path, CACHE) == [0]
    assert [data["what"] for data in profile_events(run, 0)] == ["failed"]


def test_an_unreadable_request_is_removed_and_nothing_is_traced(folder: Path) -> None:
    recipe = recipe_of()
    run = create_run(folder / "nonsense", recipe, plan_for(recipe, grad_accum=1))
    run.profiles.mkdir()
    request_file(run).write_text("{")
    assert run_ranks(1, work, run.path, CACHE) == [0]
    assert [*run.profiles.iterdir()] == []
