"""The meters in complete runs: the same values under every plan, and no effect on training."""

import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import slow
from tests.environment import CACHE
from tests.parity import plan_for, train_run, train_trajectory, trajectory_of
from tests.ranks import run_ranks
from trimaran.core import Recipe
from trimaran.data import Inputs
from trimaran.nets import Network
from trimaran.runs import RunDirectory, create_run
from trimaran.train import LossSums, Objective, read_rank_info, run_worker
from trimaran.train.steppers import stepper

SMALL = {"layers": 4, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 64}  # small enough that layers are not sampled
LATE_SECONDS = 0.1


def recipe_of(every: int = 1, steps: int = 3, **model: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"preset": "tiny", "shape": SMALL} | model,
            "data": {"seq_len": 32},
            "train": {
                "steps": steps,
                "global_batch": 8,
                "seed": 5,
                "sample": {"tokens": 0},
                "evaluate": {"batches": 0},
            },
            "telemetry": {"details_every": every},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("meters") / "runs"
    runs.mkdir()
    return runs


def lines_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@cache
def measured(folder: Path, plan: str, preset: str = "tiny") -> RunDirectory:
    """Return a run under this plan, which is JSON, with meters in every step."""
    recipe = recipe_of(preset=preset)
    return train_run(recipe, plan_for(recipe, **json.loads(plan)), folder)


@cache
def reference_lines(folder: Path, preset: str = "tiny") -> list[dict[str, Any]]:
    recipe = recipe_of(preset=preset)
    return lines_of(train_run(recipe, plan_for(recipe, grad_accum=2), folder))


def test_the_group_norms_add_up_to_the_gradient_norm(folder: Path) -> None:
    for line in reference_lines(folder):
        assert list(line["groups"]) == ["embed_tokens", *(f"layers.{number}" for number in range(4)), "norm"]
        squares = sum(each["grad_norm"] ** 2 for each in line["groups"].values())
        assert squares**0.5 == pytest.approx(line["grad_norm"], rel=1e-5)
        assert all(1e-6 < each["update_ratio"] < 0.1 for each in line["groups"].values())


@pytest.mark.parametrize(
    ("plan", "preset"),
    [
        ({"dp_shard": 2, "grad_accum": 1}, "tiny"),
        ({"pp": 2, "grad_accum": 4, "pipeline": {"schedule": "zero-bubble", "stages": [1, 1, 1, 1]}}, "tiny"),
        slow(({"dp_replicate": 2, "grad_accum": 1}, "tiny")),
        slow(({"dp_replicate": 2, "dp_shard": 2, "grad_accum": 1}, "tiny")),
        slow(({"dp_shard": 2, "sharding": "optimizer", "grad_accum": 1}, "tiny")),
        slow(({"tp": 2, "grad_accum": 2}, "tiny")),
        slow(({"cp": 2, "grad_accum": 2}, "tiny")),
        slow(({"pp": 2, "grad_accum": 4}, "tiny")),
        slow(({"pp": 2, "tp": 2, "grad_accum": 4}, "tiny")),
        slow(({"dp_shard": 2, "ep": 2, "grad_accum": 1}, "tiny-moe")),
    ],
)
def test_group_norms_are_the_same_under_every_plan(plan: dict[str, Any], preset: str, folder: Path) -> None:
    lines = lines_of(measured(folder, json.dumps(plan), preset))
    for ours, theirs in zip(lines, reference_lines(folder, preset), strict=True):
        assert list(ours["groups"]) == list(theirs["groups"])
        for name, expected in theirs["groups"].items():
            assert ours["groups"][name]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4), name
            is_exact = preset == "tiny" and name != "embed_tokens"  # larger tensors are sampled
            close = 1e-3 if is_exact else 0.1
            assert ours["groups"][name]["update_ratio"] == pytest.approx(expected["update_ratio"], rel=close), name
    assert ["ranks" in line for line in lines] == [False, False, True]
    assert lines[-1]["ranks"]["step"] == 1
    tokens = lines[-1]["ranks"]["tokens"]
    assert tokens["min"] == tokens["max"] > 0


@pytest.mark.parametrize("plan", [{"dp_shard": 2, "grad_accum": 1}, slow({"dp_replicate": 2, "grad_accum": 1})])
def test_meters_do_not_change_a_bit_of_the_trajectory(plan: dict[str, Any], folder: Path) -> None:
    recipe = recipe_of(every=0)
    plain = train_trajectory(recipe, plan_for(recipe, **plan), folder)
    ours = trajectory_of(measured(folder, json.dumps(plan)))
    assert (ours.losses, ours.norms) == (plain.losses, plain.norms)
    assert all(torch.equal(each, plain.weights[name]) for name, each in ours.weights.items())


@pytest.mark.parametrize("axis", ["dp_replicate", slow("dp_shard")])
def test_a_slow_rank_is_an_outlier_and_the_wait_for_it_is_straggler_time(axis: str, folder: Path) -> None:
    recipe = recipe_of(steps=7)
    run = create_run(folder / f"late-{axis}", recipe, plan_for(recipe, grad_accum=1, **{axis: 2}))
    assert run_ranks(2, _late_worker, run.path, CACHE) == [0, 0]
    warm = lines_of(run)[4:]  # DDP has rebuilt its buckets by then, which makes all ranks wait in a forward
    assert {line["ranks"]["busy_seconds"]["at"] for line in warm} == {1}
    assert {line["ranks"]["wait_seconds"]["at"] for line in warm} == {0}
    for line in warm:
        assert ("busy_seconds", 1) in {(each["what"], each["rank"]) for each in line["ranks"]["outliers"]}
        assert line["waits"]["comm"] + line["waits"]["straggler"] == pytest.approx(line["phases"]["comm"])
        issued = sum(line["phases"][name] for name in ("forward", "backward", "comm", "optimizer"))
        assert line["host_seconds"] == pytest.approx(issued, abs=1e-3), "a CPU computes what it issues"
        assert "host_bound" not in line
    assert max(line["waits"]["straggler"] for line in warm) > 0.5 * LATE_SECONDS


def _late_worker(path: Path, cache: Path) -> int:
    if os.environ["RANK"] == "1":
        compute_losses = stepper.compute_losses

        def compute_late(objective: Objective, network: Network, inputs: Inputs) -> tuple[LossSums, torch.Tensor]:
            time.sleep(LATE_SECONDS)
            return compute_losses(objective, network, inputs)

        stepper.compute_losses = compute_late
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)
