"""Data ranks with different numbers of rows train the same trajectory as one process, and may measure their rows."""

import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import slow
from tests.environment import CACHE
from tests.parity import assert_same_trajectory, train_run, train_trajectory, trajectory_of
from tests.ranks import run_ranks
from trimaran.core import AXES, Mesh, Plan, Recipe
from trimaran.runs import RunDirectory, create_run
from trimaran.train import read_rank_info, run_worker
from trimaran.train.features import measure_rows

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}
PLANS: dict[str, dict[str, Any]] = {
    "ddp-2": {"dp_replicate": 2, "micro_batches": (2, 6), "grad_accum": 3},
    "ddp-3": {"dp_replicate": 3, "micro_batches": (1, 2, 3), "grad_accum": 4},
    "reduced-after-2": {"dp_replicate": 2, "micro_batches": (5, 3), "grad_accum": 3, "comm": {"overlap": False}},
    "fsdp-2": {"dp_shard": 2, "micro_batches": (7, 1), "grad_accum": 3},
    "fsdp-3": {"dp_shard": 3, "micro_batches": (1, 2, 3), "grad_accum": 4},
    "ddp-2-tp-2": {"dp_replicate": 2, "tp": 2, "micro_batches": (3, 9), "grad_accum": 2},
    "ddp-2-cp-2": {"dp_replicate": 2, "cp": 2, "micro_batches": (3, 9), "grad_accum": 2},
    "ddp-2-pp-2": {"dp_replicate": 2, "pp": 2, "micro_batches": (1, 3), "grad_accum": 6},
    "hsdp-2x2": {"dp_replicate": 2, "dp_shard": 2, "micro_batches": (1, 2, 4, 5), "grad_accum": 2},
}
QUICK = ("ddp-2", "fsdp-2")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents of very different lengths, so that ranks have different numbers of valid tokens."""
    folder = tmp_path_factory.mktemp("unequal")
    with (folder / "uneven.jsonl").open("w") as file:
        for number in range(900):
            file.write(json.dumps({"text": f"{number} " * (1 + number * number % 23)}) + "\n")
    (folder / "runs").mkdir()
    return folder


def recipe_for(workspace: Path, preset: str = "tiny", **train: object) -> Recipe:
    data = {"source": "jsonl", "path": str(workspace / "uneven.jsonl"), "seq_len": 32, "isolate_documents": True}
    return Recipe.model_validate(
        {
            "model": {"preset": preset, "shape": SHAPE},
            "data": data | {"holdout": 0.1},
            "train": {"steps": 5, "global_batch": 24, "lr": 1e-2, "seed": 3, "sample": {"tokens": 0}} | train,
        }
    )


def plan_of(**fields: Any) -> Plan:
    mesh = Mesh(**{axis: fields.pop(axis) for axis in AXES if axis in fields})
    return Plan.model_validate({"mesh": mesh, "sharding": "parameters" if mesh.dp_shard > 1 else "none"} | fields)


@cache
def reference(workspace: Path, preset: str = "tiny") -> RunDirectory:
    return train_run(recipe_for(workspace, preset), plan_of(micro_batch=24), workspace / "runs")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in PLANS])
def test_unequal_rows_train_the_same_trajectory_as_one_process(workspace: Path, name: str) -> None:
    plan = plan_of(**PLANS[name])
    assert plan.global_batch == 24
    run = train_run(recipe_for(workspace), plan, workspace / "runs")
    trajectory = trajectory_of(run)
    assert_same_trajectory(trajectory, trajectory_of(reference(workspace)))
    assert trajectory.losses[-1] < 0.95 * trajectory.losses[0], "the loss must fall, or the comparison proves nothing"
    alone, unequal = evaluations(reference(workspace)), evaluations(run)
    assert alone
    assert [tokens for tokens, _ in alone] == [tokens for tokens, _ in unequal]
    assert all(abs(ours - theirs) <= 1e-5 * theirs for (_, ours), (_, theirs) in zip(unequal, alone, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"dp_replicate": 2}, {"dp_shard": 2}, {"dp_replicate": 2, "ep": 2}])
def test_mixtures_of_experts_take_unequal_rows(workspace: Path, degrees: dict[str, int]) -> None:
    plan = plan_of(**degrees, micro_batches=(3, 9), grad_accum=2)
    trajectory = train_trajectory(recipe_for(workspace, "tiny-moe"), plan, workspace / "runs")
    assert_same_trajectory(trajectory, trajectory_of(reference(workspace, "tiny-moe")))


def evaluations(run: RunDirectory) -> list[tuple[int, float]]:
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return [(each["data"]["tokens"], each["data"]["loss"]) for each in events if each["kind"] == "evaluation"]


def measured_worker(path: Path, cache: Path, slow_rank: int, seconds: float) -> int:
    """Train a rank; that of `slow_rank` sleeps for so many seconds per row in every forward of a linear layer."""
    measure_rows.MEASURED_SECONDS = 0.3
    info = read_rank_info(os.environ)
    if info.rank == slow_rank:
        forward = nn.Embedding.forward

        def sleepy(self: nn.Embedding, input: torch.Tensor) -> torch.Tensor:
            time.sleep(seconds * len(input))
            return forward(self, input)

        nn.Embedding.forward = sleepy  # in this forked rank only
    return run_worker(RunDirectory(path), info, cache=cache)


@pytest.mark.parametrize("degrees", [slow({"dp_replicate": 2}), {"dp_shard": 2}], ids=["ddp-2", "fsdp-2"])
def test_measured_rows_follow_the_speed_and_train_exactly_as_given_rows(
    workspace: Path, degrees: dict[str, int]
) -> None:
    recipe = recipe_for(workspace, steps=3)
    plan = plan_of(**degrees, micro_batch=6, micro_batches="measured", grad_accum=2)
    run = create_run(workspace / "runs" / f"measured-{len(list((workspace / 'runs').iterdir()))}", recipe, plan)
    assert run_ranks(2, measured_worker, run.path, CACHE, 0, 0.05) == [0, 0]
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    (rows,) = [each["data"] for each in events if each["kind"] == "rows"]
    given = rows["micro_batches"]
    assert sum(given) == 12
    assert given[0] < given[1]
    assert rows["seconds_per_row"][0] > 0.05
    explicit = train_trajectory(recipe, plan_of(**degrees, micro_batches=given, grad_accum=2), workspace / "runs")
    measured = trajectory_of(run)
    assert measured.losses == explicit.losses
    assert measured.norms == explicit.norms
    assert all(torch.equal(each, explicit.weights[name]) for name, each in measured.weights.items())
