"""Meters of whole runs: the same figures under every plan, the same training with and without them."""

import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import slow
from tests.parity import Trajectory, plan_for, sail_to, trajectory_of
from tests.ranks import run_ranks
from trimaran.core import Recipe
from trimaran.data.step_batch import Inputs
from trimaran.nets import Network
from trimaran.run import RunDirectory, create_run
from trimaran.train.steppers import stepper
from trimaran.train.loss.objective import LossSums, Objective
from trimaran.train.process.rank_info import read_rank_info
from trimaran.train.worker import run_worker

SMALL = {"layers": 4, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 64}  # no layer is too large to be seen whole
LATE = 0.1  # seconds


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
def alone(folder: Path, preset: str = "tiny") -> list[dict[str, Any]]:
    recipe = recipe_of(preset=preset)
    return lines_of(sail_to(recipe, plan_for(recipe, grad_accum=2), folder))


def test_the_groups_of_a_network_make_up_its_gradient(folder: Path) -> None:
    for line in alone(folder):
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
def test_groups_are_those_of_the_whole_network_under_every_plan(
    plan: dict[str, Any], preset: str, folder: Path
) -> None:
    recipe = recipe_of(preset=preset)
    lines = lines_of(sail_to(recipe, plan_for(recipe, **plan), folder))
    for ours, theirs in zip(lines, alone(folder, preset), strict=True):
        assert list(ours["groups"]) == list(theirs["groups"])
        for name, told in theirs["groups"].items():
            assert ours["groups"][name]["grad_norm"] == pytest.approx(told["grad_norm"], rel=1e-4), name
            is_whole = preset == "tiny" and name != "embed_tokens"  # larger tables are sampled
            close = 1e-3 if is_whole else 0.1
            assert ours["groups"][name]["update_ratio"] == pytest.approx(told["update_ratio"], rel=close), name
    assert [line["ranks"]["step"] for line in lines[1:]] == [1, 2]
    tokens = lines[-1]["ranks"]["tokens"]
    assert tokens["min"] == tokens["max"] > 0


@pytest.mark.parametrize("plan", [{"dp_replicate": 2, "grad_accum": 1}, slow({"dp_shard": 2, "grad_accum": 1})])
def test_meters_change_no_bit_of_the_training(plan: dict[str, Any], folder: Path) -> None:
    def course(every: int) -> Trajectory:
        recipe = recipe_of(every)
        return trajectory_of(sail_to(recipe, plan_for(recipe, **plan), folder))

    measured, plain = course(1), course(0)
    assert (measured.losses, measured.norms) == (plain.losses, plain.norms)
    assert all(torch.equal(each, plain.weights[name]) for name, each in measured.weights.items())


@pytest.mark.parametrize("axis", ["dp_replicate", slow("dp_shard")])
def test_a_rank_that_computes_slowly_is_named_and_its_lateness_told_apart(axis: str, folder: Path) -> None:
    recipe = recipe_of(steps=6)
    run = create_run(folder / f"late-{axis}", recipe, plan_for(recipe, grad_accum=1, **{axis: 2}))
    assert run_ranks(2, _late_worker, run.path, folder.parent / "cache") == [0, 0]
    warm = lines_of(run)[3:]  # DDP has settled its buckets by then, for which all wait in a forward
    assert {line["ranks"]["busy_seconds"]["at"] for line in warm} == {1}
    assert {line["ranks"]["wait_seconds"]["at"] for line in warm} == {0}
    for line in warm:
        assert ("busy_seconds", 1) in {(each["what"], each["rank"]) for each in line["ranks"]["outliers"]}
        assert line["waits"]["comm"] + line["waits"]["straggler"] == pytest.approx(line["phases"]["comm"])
    assert max(line["waits"]["straggler"] for line in warm) > 0.5 * LATE


def _late_worker(path: Path, cache: Path) -> int:
    if os.environ["RANK"] == "1":
        punctual = stepper.losses_of

        def late(objective: Objective, network: Network, inputs: Inputs) -> tuple[LossSums, torch.Tensor]:
            time.sleep(LATE)
            return punctual(objective, network, inputs)

        stepper.losses_of = late
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)
