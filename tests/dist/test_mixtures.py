"""Mixtures of experts of other architectures train the same trajectory under combined plans as in one process."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.cases import quick_or_slow
from tests.mixture_models import save_mixture
from tests.parity import Trajectory, assert_same_trajectory, plan_for, train_trajectory
from trimaran.core import Recipe

PLANS: dict[str, dict[str, Any]] = {
    "fsdp-tp-ep": {"dp_shard": 2, "tp": 2, "ep": 2},
    "pp-cp": {"pp": 2, "cp": 2, "grad_accum": 2},
    "ddp-2": {"dp_replicate": 2},
    "fsdp-2-recompute": {"dp_shard": 2, "recompute": "full"},
    "tp-2": {"tp": 2},
    "pp-tp": {"pp": 2, "tp": 2, "grad_accum": 2},
    "cp-exchange-ep": {"cp": 2, "ep": 2, "comm": {"context": "exchange"}},
    "replicated-ep-tp": {"dp_replicate": 2, "tp": 2, "ep": 2},
    "pp-ep": {"pp": 2, "dp_shard": 2, "ep": 2, "grad_accum": 2},
}
MODELS = ("deepseek-v3", "gpt-oss", "mixtral-window", "deepseek-v2", "glm-4.5", "llama-4")
QUICK = {("deepseek-v3", "fsdp-tp-ep"), ("deepseek-v3", "pp-cp"), ("gpt-oss", "fsdp-tp-ep"), ("gpt-oss", "pp-cp")}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    (folder / "runs").mkdir()
    return folder


@lru_cache
def recipe_for(workspace: Path, name: str) -> Recipe:
    save_mixture(name, workspace / name)
    corrected = name in ("deepseek-v3", "glm-4.5")
    shape = {"experts": {"router": {"correction_rate": 0.02}}} if corrected else {}
    return Recipe.model_validate(
        {
            "model": {"path": str(workspace / name), "shape": shape},
            "data": {"seq_len": 16, "isolate_documents": True},
            "train": {"steps": 3, "global_batch": 8, "lr": 1e-3, "seed": 3, "sample": {"tokens": 0}},
        }
    )


@lru_cache
def reference(workspace: Path, name: str) -> Trajectory:
    recipe = recipe_for(workspace, name)
    return train_trajectory(recipe, plan_for(recipe, grad_accum=1), workspace / "runs")


@pytest.mark.parametrize(
    ("name", "plan"), quick_or_slow([(name, plan) for name in MODELS for plan in PLANS], QUICK.__contains__)
)
def test_every_plan_trains_the_same_trajectory(workspace: Path, name: str, plan: str) -> None:
    recipe = recipe_for(workspace, name)
    trajectory = train_trajectory(recipe, plan_for(recipe, **{"grad_accum": 1} | PLANS[plan]), workspace / "runs")
    assert_same_trajectory(trajectory, reference(workspace, name))
    biases = [each for key, each in trajectory.weights.items() if key.endswith("e_score_correction_bias")]
    assert len(biases) == (2 if name in ("deepseek-v3", "glm-4.5") else 0)
