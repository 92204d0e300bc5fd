"""The perception model, which is not a stack of equal layers, trains the trajectory of one process under every axis."""

from pathlib import Path
from typing import Any

import pytest

from tests.cases import quick_or_slow, slow
from tests.parity import Trajectory, assert_same_trajectory, differences, plan_for, train_trajectory
from trimaran.core import ModelSection, Recipe
from trimaran.data import make_scene, write_scenes
from trimaran.models import PerceptionSpec, spec_of
from trimaran.nets import initialise, perception_network

SHAPE = {
    "cameras": 3, "height": 8, "width": 16, "camera_widths": [8, 8], "lidar_layers": 1, "fusion_layers": 2,
    "hidden": 16, "heads": 2, "ffn": 16, "cells": 8,
}  # fmt: skip
RECIPE = Recipe.model_validate(
    {
        "name": "scenes",
        "model": {"family": "perception", "shape": SHAPE},
        "data": {"source": "scenes", "workers": 0},
        "train": {"steps": 2, "global_batch": 4, "schedule": {"warmup_steps": 0}, "evaluate": {"batches": 1}},
        "checkpoint": {"every": 0, "memory": 0},
    }
)
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2, "grad_accum": 2},
    "zero-1": {"dp_shard": 2, "grad_accum": 2, "sharding": "optimizer"},
    "zero-2": {"dp_shard": 2, "grad_accum": 2, "sharding": "gradients", "recompute": "selective"},
    "zero-3": {"dp_shard": 2, "grad_accum": 1, "recompute": "full"},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "grad_accum": 1},
    "tp": {"tp": 2, "grad_accum": 1},
    "pp": {"pp": 2, "grad_accum": 4},
    "pp-in-the-camera": {"pp": 2, "grad_accum": 2, "pipeline": {"schedule": "gpipe", "stages": (2, 8)}},
    "tp-fsdp": {"tp": 2, "dp_shard": 2, "grad_accum": 1},
    "pp-interleaved": {"pp": 2, "grad_accum": 2, "pipeline": {"schedule": "interleaved", "stages": (3, 3, 2, 2)}},
}

QUICK = ("zero-3", "tp", "pp-in-the-camera")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("perception") / "runs"


@pytest.fixture(scope="module")
def reference(folder: Path) -> Trajectory:
    folder.mkdir()
    return train_trajectory(RECIPE, plan_for(RECIPE, grad_accum=1), folder)


@pytest.mark.parametrize("name", quick_or_slow(PLANS, QUICK.__contains__))
def test_every_plan_trains_like_one_process(name: str, folder: Path, reference: Trajectory) -> None:
    trajectory = train_trajectory(RECIPE, plan_for(RECIPE, **PLANS[name]), folder)
    assert_same_trajectory(trajectory, reference)


def test_bf16_stays_close_to_fp32(folder: Path, reference: Trajectory) -> None:
    trajectory = train_trajectory(RECIPE, plan_for(RECIPE, grad_accum=1, precision="bf16"), folder)
    loss, _, _ = differences(trajectory, reference)
    assert 0 < loss < 0.02


def test_a_frozen_tower_does_not_change(folder: Path, reference: Trajectory) -> None:
    frozen = RECIPE.model_copy(update={"model": ModelSection(family="perception", shape=SHAPE, freeze=("camera",))})
    alone = train_trajectory(frozen, plan_for(frozen, grad_accum=1), folder)
    assert alone.losses[0] == reference.losses[0]
    assert alone.losses[-1] != reference.losses[-1]
    spec = spec_of(frozen.model)
    assert isinstance(spec, PerceptionSpec)
    first = perception_network(spec).module
    initialise(first, seed=frozen.train.seed, spec=spec)
    for name, value in first.named_parameters():
        assert alone.weights[name].equal(value) == name.startswith("camera."), name


RADAR_SHAPES = {"all": {"radar_layers": 1}, "lidar-radar": {"radar_layers": 1, "cameras": 0, "fusion_layers": 0}}
RADAR_PLANS: dict[str, dict[str, Any]] = {
    "zero-3": {"dp_shard": 2, "grad_accum": 2},
    "pp-in-the-radar": {"pp": 2, "grad_accum": 2, "pipeline": {"schedule": "gpipe", "stages": (7, 5)}},
    "tp": {"tp": 2, "grad_accum": 1},
}


@pytest.mark.parametrize(
    ("sensors", "name"),
    [
        slow(("all", "pp-in-the-radar")),
        slow(("all", "zero-3")),
        slow(("all", "tp")),
        slow(("lidar-radar", "zero-3")),
    ],
)
def test_a_model_with_radar_trains_like_one_process(sensors: str, name: str, tmp_path: Path) -> None:
    model = ModelSection(family="perception", shape=SHAPE | RADAR_SHAPES[sensors])
    recipe = RECIPE.model_copy(update={"model": model})
    expected = train_trajectory(recipe, plan_for(recipe, grad_accum=1), tmp_path)
    assert_same_trajectory(train_trajectory(recipe, plan_for(recipe, **RADAR_PLANS[name]), tmp_path), expected)


@pytest.mark.slow
def test_recorded_scenes_train_like_one_process(tmp_path: Path) -> None:
    spec = spec_of(RECIPE.model)
    assert isinstance(spec, PerceptionSpec)
    rules = spec.scenes()
    write_scenes([make_scene(0, number, rules) for number in range(20)], rules, tmp_path / "scenes")
    (tmp_path / "runs").mkdir()
    data = RECIPE.data.model_copy(update={"path": str(tmp_path / "scenes"), "holdout": 0.2})
    recipe = RECIPE.model_copy(update={"data": data})
    expected = train_trajectory(recipe, plan_for(recipe, grad_accum=1), tmp_path / "runs")
    for name in ("ddp", "zero-3", "pp"):
        assert_same_trajectory(train_trajectory(recipe, plan_for(recipe, **PLANS[name]), tmp_path / "runs"), expected)
