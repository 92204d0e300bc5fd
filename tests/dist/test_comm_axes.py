"""Exposed communication by axis, in complete runs of real ranks."""

import json
import os
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.cases import slow
from tests.environment import CACHE
from tests.parity import plan_for, train_run, trajectory_of
from tests.ranks import run_ranks
from trimaran.core import Recipe
from trimaran.parallel import AXIS_WAITS, AxisWaits, await_rows, gather_dim, gather_sequence, start_exchange
from trimaran.parallel.comm import tensor_collectives
from trimaran.runs import RunDirectory, create_run
from trimaran.train import read_rank_info, run_worker

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 64}
LATE_SECONDS = 0.3


def recipe_of(steps: int = 3, preset: str = "tiny") -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"preset": preset, "shape": SHAPE},
            "data": {"seq_len": 64},
            "train": {
                "steps": steps,
                "global_batch": 8,
                "seed": 5,
                "sample": {"tokens": 0},
                "evaluate": {"batches": 0},
            },
            "telemetry": {"details_every": 1000},
            "checkpoint": {"memory": 0},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("axes") / "runs"
    runs.mkdir()
    return runs


@cache
def measured(folder: Path, plan: str, preset: str) -> RunDirectory:
    """Return a run under this plan, which is JSON."""
    recipe = recipe_of(preset=preset)
    return train_run(recipe, plan_for(recipe, **json.loads(plan)), folder)


def lines_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.mark.parametrize(
    ("plan", "axes", "preset"),
    [
        ({"grad_accum": 2}, set(), "tiny"),
        ({"tp": 2, "grad_accum": 2}, {"tp", "world"}, "tiny"),
        ({"dp_shard": 2, "ep": 2, "grad_accum": 1}, {"dp_shard", "ep", "world"}, "tiny-moe"),
        ({"pp": 2, "grad_accum": 2}, {"pp", "world"}, "tiny"),
        ({"cp": 2, "grad_accum": 1, "comm": {"context": "exchange"}}, {"cp", "world"}, "tiny"),
        slow(({"cp": 2, "grad_accum": 1}, {"cp", "world"}, "tiny")),
        slow(({"dp_replicate": 2, "grad_accum": 2}, {"dp_replicate", "world"}, "tiny")),
        slow(({"dp_replicate": 2, "grad_accum": 2, "comm": {"overlap": False}}, {"dp_replicate", "world"}, "tiny")),
        slow(({"dp_replicate": 2, "grad_accum": 2, "comm": {"local_steps": 2}}, {"dp_replicate", "world"}, "tiny")),
        slow(({"pp": 2, "tp": 2, "grad_accum": 2}, {"pp", "tp", "world"}, "tiny")),
        slow(({"pp": 2, "dp_shard": 2, "grad_accum": 2}, {"pp", "dp_shard", "world"}, "tiny")),
        slow(({"tp": 2, "grad_accum": 2, "comm": {"regather": True}}, {"tp", "world"}, "tiny")),
        slow(({"tp": 2, "grad_accum": 2, "recompute": "full"}, {"tp", "world"}, "tiny")),
    ],
)
def test_each_axis_of_the_plan_has_its_waits_and_they_add_up(
    plan: dict[str, Any], axes: set[str], preset: str, folder: Path
) -> None:
    for line in lines_of(measured(folder, json.dumps(plan), preset)):
        assert sum(line["phases"].values()) == pytest.approx(line["step_seconds"], abs=1e-5)
        assert all(seconds >= 0 for seconds in line["phases"].values())
        found = line.get("comm_seconds", {})
        assert set(found) == axes
        if axes:
            assert all(seconds > 0 for seconds in found.values())
            assert sum(found.values()) == pytest.approx(line["phases"]["comm"], abs=1e-5)


@pytest.mark.slow
def test_an_axis_whose_waits_are_not_all_measured_has_no_number(folder: Path) -> None:
    recipe = recipe_of()
    plan = plan_for(recipe, dp_replicate=2, dp_shard=2, grad_accum=1)
    line = lines_of(train_run(recipe, plan, folder))[-1]
    assert line["comm_seconds"]["dp_replicate"] is None, "it is part of the same call as that of the shards"
    assert line["comm_seconds"]["dp_shard"] > 0
    plan = plan_for(recipe, tp=2, grad_accum=1, compile=True)
    line = lines_of(train_run(recipe, plan, folder))[-1]
    assert line["comm_seconds"]["tp"] is None, "compiled blocks communicate inside torch's code"
    assert sum(line["phases"].values()) == pytest.approx(line["step_seconds"], abs=1e-5)


def test_the_wait_for_a_late_rank_in_a_layer_is_communication_and_not_forward(folder: Path) -> None:
    recipe = recipe_of(steps=5)
    run = create_run(folder / "late", recipe, plan_for(recipe, tp=2, grad_accum=1))
    assert run_ranks(2, _late_worker, run.path, CACHE) == [0, 0]
    warm = lines_of(run)[1:]
    assert max(line["comm_seconds"]["tp"] for line in warm) > 0.5 * LATE_SECONDS
    assert min(line["phases"]["forward"] for line in warm) < 0.5 * LATE_SECONDS
    assert min(line["comm_seconds"]["world"] for line in warm) < 0.5 * LATE_SECONDS


class LateCollectives:
    """The collectives of torch, of which some reduce-scatters start late."""

    def __init__(self, collective: Any) -> None:
        self.collective, self.last = collective, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collective, name)

    def reduce_scatter_tensor(self, *args: Any) -> Tensor:
        if time.monotonic() - self.last > LATE_SECONDS / 2:
            time.sleep(LATE_SECONDS)
            self.last = time.monotonic()
        return self.collective.reduce_scatter_tensor(*args)


def _late_worker(path: Path, cache: Path) -> int:
    """Run a worker whose rank 1 starts some of its reduce-scatters late."""
    if os.environ["RANK"] == "1":
        late = LateCollectives(tensor_collectives.collective)
        tensor_collectives.collective = late  # pyrefly: ignore[bad-assignment]
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)


@pytest.mark.parametrize("plan", [{"tp": 2, "grad_accum": 2}, slow({"dp_shard": 2, "ep": 2, "grad_accum": 1})])
def test_measuring_waits_does_not_change_a_bit_of_the_trajectory(plan: dict[str, Any], folder: Path) -> None:
    preset = "tiny-moe" if "ep" in plan else "tiny"
    recipe, usual = recipe_of(preset=preset), trajectory_of(measured(folder, json.dumps(plan), preset))
    run = create_run(folder / f"plain-{len(list(folder.iterdir()))}", recipe, plan_for(recipe, **plan))
    assert run_ranks(2, _unmeasured_worker, run.path, CACHE) == [0, 0]
    plain = trajectory_of(run)
    assert (usual.losses, usual.norms) == (plain.losses, plain.norms)
    assert all(torch.equal(each, plain.weights[name]) for name, each in usual.weights.items())


def _unmeasured_worker(path: Path, cache: Path) -> int:
    AxisWaits.start = lambda *_: None  # pyrefly: ignore[bad-assignment]
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)


def count_waits() -> dict[str, dict[str, int]]:
    """Return how many waits each axis reports in forward and in backward, without and with recompute."""
    dist.init_process_group("gloo")
    mesh, counted = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), Counter[str]()
    group = mesh.get_group()

    def span(axis: str) -> AbstractContextManager[None]:
        counted[axis] += 1
        return nullcontext()

    def layer(x: Tensor) -> Tensor:
        x = gather_sequence(x, mesh).sin()
        x = gather_dim(x, 1, group, axis="cp").cos()
        return await_rows(start_exchange(x[0], [4, 4], [4, 4], group, axis="ep"), axis="ep").exp()

    found = {}
    for name in ("plain", "recomputed", "outside"):
        x = torch.ones(1, 2, 3, requires_grad=True)
        if name != "outside":
            AXIS_WAITS.start(span)
        out = layer(x) if name != "recomputed" else checkpoint(layer, x, use_reentrant=False)
        out.sum().backward()
        AXIS_WAITS.stop()
        assert x.grad is not None
        found[name] = dict(counted)
        counted.clear()
    dist.destroy_process_group()
    return found


def test_every_collective_reports_its_wait_in_forward_in_backward_and_when_recomputed() -> None:
    for found in run_ranks(2, count_waits):
        assert found["plain"] == {"tp": 2, "cp": 2, "ep": 2}
        assert found["recomputed"]["tp"] == 3, "forward, recompute and backward"
        assert found["outside"] == {}, "nothing is measured between steps"
