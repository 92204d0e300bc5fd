"""Training on one GPU. Skipped elsewhere; run on the H200 before a release."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.core import Plan, Recipe
from trimaran.runs import create_run

pytestmark = pytest.mark.gpu

RECIPE = Recipe.model_validate({"train": {"steps": 20, "global_batch": 8, "sample": {"tokens": 8}}})


def losses(plan: Plan, folder: Path) -> list[float]:
    run = create_run(folder / f"run-{len(list(folder.iterdir()))}", RECIPE, plan)
    # A new process: one forked from a process that has initialised CUDA cannot use CUDA.
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "TRIMARAN_CACHE": str(folder / "cache")}
    done = subprocess.run([sys.executable, "-m", "trimaran.train", run.path], env=environment, timeout=300)
    assert done.returncode == 0, run.log(0).read_text()
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        assert sum(line["phases"].values()) == pytest.approx(line["step_seconds"])
        assert line["peak_bytes"] > 0
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def fp32(folder: Path) -> list[float]:
    return losses(Plan(micro_batch=8), folder)


def test_fp32_learns_on_the_gpu(fp32: list[float]) -> None:
    assert fp32[-1] < 0.7 * fp32[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_matches_fp32_within_its_precision(folder: Path, fp32: list[float], compiled: bool) -> None:
    trajectory = losses(Plan(micro_batch=4, grad_accum=2, precision="bf16", compile=compiled), folder)
    assert trajectory == pytest.approx(fp32, rel=0.02)


def test_a_sharded_network_trains_the_same_on_a_mesh_of_one(folder: Path, fp32: list[float]) -> None:
    trajectory = losses(Plan(micro_batch=8, sharding="parameters"), folder)
    assert trajectory == pytest.approx(fp32, rel=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"offload": "optimizer"},
        {"offload": "parameters", "sharding": "parameters"},
        {"offload": "activations"},
        {"offload": "activations", "recompute": "full"},
        {"recompute": "selective"},
        {"recompute": 2, "compile": True},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_offload_and_recompute_do_not_change_the_losses(
    folder: Path, fp32: list[float], fields: dict[str, object]
) -> None:
    plan = Plan.model_validate({"micro_batch": 4, "grad_accum": 2, **fields})
    assert losses(plan, folder) == pytest.approx(fp32, rel=1e-5)
