"""Dense architectures beyond Llama train under combined plans as in one process, and export what transformers loads."""

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.cases import quick_or_slow
from tests.family_configs import CONFIGS
from tests.matrix import write_documents
from tests.parity import Trajectory, assert_same_trajectory, plan_for, train_run, trajectory_of
from trimaran.core import Recipe
from trimaran.hardware import parse_cluster
from trimaran.models import spec_of
from trimaran.planner import check_plan

PLANS: dict[str, dict[str, Any]] = {
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2": {"tp": 2, "recompute": "full"},
    "cp2-gather": {"cp": 2, "comm": {"context": "gather"}},
    "cp2-exchange": {"cp": 2, "comm": {"context": "exchange"}, "recompute": "selective"},
    "fsdp2-tp2": {"dp_shard": 2, "tp": 2},
}
# With AdamW's usual eps an update has the same size for any gradient, even for rounding errors: biases of keys would
# differ by 1e-4 between two runs of one process whose micro-batches differ.
EPS = {"eps": 1e-3}
QUICK = {("gemma2", "tp2-pp2"), ("olmo2", "tp2"), ("mistral", "cp2-gather"), ("cohere2", "cp2-exchange")}
FAMILIES = ("mistral", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "phi3-long", "olmo2", "cohere", "cohere2", "glm4")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    write_documents(folder / "uneven.jsonl")
    (folder / "runs").mkdir()
    return folder


@lru_cache
def recipe_for(workspace: Path, family: str) -> Recipe:
    folder = workspace / family
    config = deepcopy(CONFIGS[family])
    config.vocab_size = 320  # bytes
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return Recipe.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {
                "source": "jsonl",
                "path": str(workspace / "uneven.jsonl"),
                "seq_len": 32,
                "isolate_documents": True,
            },
            "train": {"steps": 3, "global_batch": 8, "lr": 3e-3, "seed": 3, "sample": {"tokens": 0}, "optimizer": EPS},
        }
    )


@lru_cache
def reference(workspace: Path, family: str) -> Trajectory:
    recipe = recipe_for(workspace, family)
    return trajectory_of(train_run(recipe, plan_for(recipe, grad_accum=1), workspace / "runs"))


@pytest.mark.parametrize(
    ("family", "plan"), quick_or_slow([(family, plan) for family in FAMILIES for plan in PLANS], QUICK.__contains__)
)
def test_an_architecture_trains_the_same_trajectory_under_every_plan(workspace: Path, family: str, plan: str) -> None:
    recipe = recipe_for(workspace, family)
    chosen = plan_for(recipe, grad_accum=2, **PLANS[plan])
    check_plan(chosen, recipe, spec_of(recipe.model), parse_cluster(f"{chosen.mesh.world_size}xcpu"))
    run = train_run(recipe, chosen, workspace / "runs")
    assert_same_trajectory(trajectory_of(run), reference(workspace, family))
    before, after = (load_file(each / "model.safetensors") for each in (workspace / family, run.model))
    assert {name: each.shape for name, each in before.items()} == {name: each.shape for name, each in after.items()}
