"""Hugging Face models that are cut into pipeline stages train the trajectory of one process.

The gradients of packed projections and of stacked experts are compared in `test_hf.py`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, OpenAIGPTConfig

from tests.cases import slow
from tests.hf_models import UNDROPPED
from tests.hf_pipeline_models import save_config
from tests.parity import Trajectory, assert_same_trajectory, plan_for, train_trajectory
from trimaran.core import Recipe

PP: dict[str, Any] = {"pp": 2, "grad_accum": 2}


def recipe_for(model: Path, folder: Path, *, isolated: bool, steps: int = 2, **train: Any) -> Recipe:
    text = folder / "uneven.jsonl"
    with text.open("w") as file:
        for number in range(120):
            file.write(json.dumps({"text": f"{number} " * (1 + number * number % 23)}) + "\n")
    return Recipe.model_validate(
        {
            "model": {"family": "hf", "path": str(model)},
            "data": {"source": "jsonl", "path": str(text), "seq_len": 32, "isolate_documents": isolated},
            "train": {"steps": steps, "global_batch": 8, "lr": 3e-3, "seed": 3, "sample": {"tokens": 0}} | train,
        }
    )


def assert_parity(name: str, plans: list[dict[str, Any]], folder: Path, *, isolated: bool = True) -> list[Trajectory]:
    recipe = recipe_for(save_config(name, folder / "model"), folder, isolated=isolated)
    (folder / "runs").mkdir()
    alone = train_trajectory(recipe, plan_for(recipe, grad_accum=2), folder / "runs")
    assert len(set(alone.losses)) == len(alone.losses)
    trajectories = [train_trajectory(recipe, plan_for(recipe, **plan), folder / "runs") for plan in plans]
    for trajectory in trajectories:
        assert_same_trajectory(without_biases(trajectory), without_biases(alone))
    return trajectories


def without_biases(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory without biases: that of keys has a gradient of rounding errors, which AdamW enlarges."""
    weights = {name: each for name, each in trajectory.weights.items() if not name.endswith("bias")}
    return replace(trajectory, weights=weights)


@pytest.mark.parametrize(
    ("name", "isolated"),
    [
        ("gpt2", True),
        *[slow((name, True)) for name in ("gemma2", "llama-tied")],
        *[slow((name, True)) for name in ("llama", "gpt-neox", "phi", "phi3", "qwen3", "gemma3", "cohere", "gptj")],
        *[slow((name, True)) for name in ("mixtral", "qwen3-moe", "gpt-oss", "falcon")],
        *[slow((name, False)) for name in ("opt", "bloom")],
    ],
)
def test_a_pipeline_trains_as_one_process(name: str, isolated: bool, tmp_path: Path) -> None:
    assert_parity(name, [PP], tmp_path, isolated=isolated)


def test_layers_that_return_a_list_are_cut_into_stages(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = OpenAIGPTConfig(vocab_size=320, n_embd=32, n_layer=4, n_head=4, n_positions=64, **UNDROPPED)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    recipe = recipe_for(tmp_path / "model", tmp_path, isolated=False)
    (tmp_path / "runs").mkdir()
    alone, cut = (
        train_trajectory(recipe, plan_for(recipe, grad_accum=2, **mesh), tmp_path / "runs") for mesh in ({}, {"pp": 2})
    )
    assert_same_trajectory(without_biases(cut), without_biases(alone))


COMBINED: list[dict[str, Any]] = [
    {"pp": 2, "dp_shard": 2, "grad_accum": 2},
    {"pp": 2, "dp_replicate": 2, "grad_accum": 2, "recompute": "full"},
    {"pp": 2, "dp_shard": 2, "sharding": "optimizer", "grad_accum": 2, "recompute": "selective"},
    {"pp": 2, "tp": 2, "grad_accum": 2},
    {"pp": 2, "cp": 2, "grad_accum": 2, "sharding": "parameters"},
    {"pp": 2, "grad_accum": 4, "pipeline": {"schedule": "interleaved"}},
    {"pp": 2, "grad_accum": 4, "pipeline": {"schedule": "zero-bubble"}},
    {"pp": 4, "grad_accum": 4, "pipeline": {"schedule": "gpipe"}},
    {"pp": 2, "grad_accum": 2, "pipeline": {"stages": [1, 3]}},
    {"pp": 2, "dp_shard": 2, "grad_accum": 4, "pipeline": {"schedule": "zero-bubble"}},
]


EXPERTS: list[dict[str, Any]] = [
    {"dp_shard": 2, "ep": 2, "grad_accum": 2},
    {"dp_replicate": 2, "ep": 2, "grad_accum": 2},
    {"dp_shard": 4, "ep": 2, "grad_accum": 2},
    {"pp": 2, "dp_shard": 2, "ep": 2, "grad_accum": 2},
    {"pp": 2, "dp_replicate": 2, "ep": 2, "grad_accum": 4, "pipeline": {"schedule": "zero-bubble"}},
]
# Not for GPT-OSS, which has windows and for which transformers has no tensor-parallel plan.
SPLIT_EXPERTS: list[dict[str, Any]] = [
    {"dp_shard": 2, "tp": 2, "ep": 2, "grad_accum": 2},
    {"dp_replicate": 2, "tp": 2, "ep": 2, "grad_accum": 2},
    {"tp": 2, "grad_accum": 2},
    {"pp": 2, "tp": 2, "grad_accum": 2},
    {"cp": 2, "ep": 2, "grad_accum": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plans"),
    [
        *[(name, EXPERTS) for name in ("mixtral", "qwen2-moe", "olmoe", "gpt-oss", "qwen3-moe")],
        *[(name, SPLIT_EXPERTS) for name in ("mixtral", "qwen3-moe")],
    ],
)
def test_stacked_experts_are_spread(name: str, plans: list[dict[str, Any]], tmp_path: Path) -> None:
    assert_parity(name, plans, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_packed_projections_are_split(name: str, tmp_path: Path) -> None:
    assert_parity(name, [{"tp": 2, "grad_accum": 2}], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("plan", COMBINED, ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "gpt-neox"])
def test_a_pipeline_combines_with_every_axis(name: str, plan: dict[str, Any], tmp_path: Path) -> None:
    assert_parity(name, [plan], tmp_path)


@pytest.mark.slow  # the compiler takes minutes
@pytest.mark.parametrize(
    ("name", "plan"),
    [("llama-tied", COMBINED[6]), ("gemma2", PP | {"dp_shard": 2}), ("qwen3-moe", PP | {"dp_shard": 2, "ep": 2})],
)
def test_compiled_stages_train_as_one_process(name: str, plan: dict[str, Any], tmp_path: Path) -> None:
    assert_parity(name, [plan | {"compile": True}], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *[(name, PP) for name in ("llama", "gpt2", "opt", "bloom")],
        ("llama", COMBINED[6]),
        ("gemma2", PP | {"dp_shard": 2}),
        *[(name, PP | {"dp_shard": 2, "ep": 2}) for name in ("qwen3-moe", "gpt-oss")],
    ],
)
def test_stages_in_bf16_compute_what_the_model_computes_without_stages(
    name: str, plan: dict[str, Any], tmp_path: Path
) -> None:
    # The two gradients of a tied embedding are added before or after they are rounded.
    model = save_config(name, tmp_path / "model", tie_word_embeddings=False)
    recipe = recipe_for(model, tmp_path, isolated=name not in ("opt", "bloom"), optimizer={"eps": 1e-3})
    (tmp_path / "runs").mkdir()
    without = {key: each for key, each in plan.items() if key not in ("pp", "pipeline")}
    plans = [plan_for(recipe, precision="bf16", **fields) for fields in (without, plan)]
    whole, stages = (train_trajectory(recipe, each, tmp_path / "runs") for each in plans)
    # The last bit of the gradient norm, a sum over stages, changes how some weights are rounded: a tenth of a rounding.
    assert_same_trajectory(without_biases(stages), without_biases(whole), tolerance=4e-4)
