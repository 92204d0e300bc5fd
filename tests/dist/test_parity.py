"""Every plan trains the same trajectory as one process, and counts every token once (principles 1 and 2)."""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.cases import quick_or_slow, slow
from tests.environment import CACHE
from tests.parity import Trajectory, assert_same_trajectory, plan_for, train_run, train_trajectory
from tests.ranks import run_ranks
from trimaran.core import ModelSection, Plan, Recipe
from trimaran.data import DataShare, Loader, TokenFeed, TokenShards, prepare, split
from trimaran.parallel import build_mesh
from trimaran.train import build_networks, join_process_group, load_trained, read_rank_info

PLANS = {
    "one-process": {},
    "ddp-2": {"dp_replicate": 2},
    "ddp-4": {"dp_replicate": 4},
    "reduced-after-2": {"dp_replicate": 2, "comm": {"overlap": False}},
    "fsdp-2": {"dp_shard": 2},
    "fsdp-4": {"dp_shard": 4},
    "hsdp-2x2": {"dp_replicate": 2, "dp_shard": 2},
}
QUICK = {("one-process", 4), ("ddp-2", 1)}  # the matrix has the others
SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents of very different lengths, so that ranks have different numbers of valid tokens."""
    folder = tmp_path_factory.mktemp("parity")
    with (folder / "uneven.jsonl").open("w") as file:
        for number in range(900):
            file.write(json.dumps({"text": f"{number} " * (1 + number * number % 23)}) + "\n")
    (folder / "runs").mkdir()
    return folder


SMALL = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hf_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(1)
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **experts)).save_pretrained(folder)
    return folder


def recipe_for(workspace: Path, preset: str = "tiny", **train: object) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"preset": preset, "shape": SHAPE},
            "data": {
                "source": "jsonl",
                "path": str(workspace / "uneven.jsonl"),
                "seq_len": 32,
                "isolate_documents": True,
            },
            "train": {"steps": 5, "global_batch": 16, "lr": 1e-2, "seed": 3, "sample": {"tokens": 0}} | train,
        }
    )


@lru_cache
def reference(workspace: Path, preset: str) -> Trajectory:
    recipe = recipe_for(workspace, preset)
    return train_trajectory(recipe, plan_for(recipe, grad_accum=1), workspace / "runs")


@pytest.mark.parametrize(
    ("name", "grad_accum"), quick_or_slow([(name, count) for name in PLANS for count in (1, 4)], QUICK.__contains__)
)
def test_every_plan_trains_the_same_trajectory(workspace: Path, name: str, grad_accum: int) -> None:
    recipe = recipe_for(workspace)
    trajectory = train_trajectory(recipe, plan_for(recipe, grad_accum=grad_accum, **PLANS[name]), workspace / "runs")
    assert_same_trajectory(trajectory, reference(workspace, "tiny"))
    assert trajectory.losses[-1] < 0.9 * trajectory.losses[0], "the loss must fall, or the comparison proves nothing"


def test_the_comparison_fails_for_a_different_learning_rate(workspace: Path) -> None:
    recipe = recipe_for(workspace, lr=1.0003e-2)
    trajectory = train_trajectory(recipe, plan_for(recipe, grad_accum=1), workspace / "runs")
    with pytest.raises(AssertionError, match="loss of step"):
        assert_same_trajectory(trajectory, reference(workspace, "tiny"))


def test_the_ranks_have_different_numbers_of_valid_tokens(workspace: Path) -> None:
    recipe = recipe_for(workspace)
    training, _ = split(TokenShards.open(prepare(recipe.data, cache=CACHE)), recipe.data)
    counts = []
    for rank in range(4):
        share = DataShare(rank=rank, dp=4, micro_batch=4, grad_accum=1)
        with Loader(TokenFeed(training, seed=recipe.train.seed, share=share), steps=recipe.train.steps) as loader:
            counts.append([batch.num_valid for batch in loader])
    assert all(len(set(of_step)) > 1 for of_step in zip(*counts, strict=True))


def names_under(recipe: Recipe, plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    (network,) = build_networks(recipe, plan, rank_info, build_mesh(plan.mesh, device_type="cpu"))
    return [(name, tuple(each.shape)) for name, each in network.module.named_parameters()]


@pytest.mark.parametrize("preset", [slow("tiny"), "tiny-moe"])
def test_no_plan_changes_a_parameter_name(workspace: Path, preset: str) -> None:
    recipe = recipe_for(workspace, preset)
    plans = [plan_for(recipe, grad_accum=1, **PLANS[name]) for name in ("ddp-2", "fsdp-2")]
    alone = plan_for(recipe, grad_accum=1)
    (plain,) = run_ranks(1, names_under, recipe, alone)
    for plan in [*plans, alone.model_copy(update={"compile": True})]:
        for names in run_ranks(plan.mesh.world_size, names_under, recipe, plan):
            assert names == plain


@pytest.mark.parametrize(
    ("name", "kind"), [("one-process", "hf_model"), ("fsdp-2", "hf_mixture"), slow(("ddp-2", "hf_model"))]
)
def test_a_saved_model_has_the_files_and_shapes_of_transformers(
    workspace: Path, name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(kind)
    recipe = recipe_for(workspace, steps=1).model_copy(update={"model": ModelSection(family="hf", path=str(source))})
    folder = train_run(recipe, plan_for(recipe, grad_accum=1, **PLANS[name]), workspace / "runs").model
    before, after = (load_file(each / "model.safetensors") for each in (source, folder))
    assert {name: each.shape for name, each in before.items()} == {name: each.shape for name, each in after.items()}
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.architectures == [type(model).__name__]
    tokens = torch.arange(8)[None]
    assert torch.allclose(
        model(tokens).logits, load_trained(recipe.model, folder).forward({"tokens": tokens})[0], atol=1e-6
    )


@pytest.mark.parametrize("family", ["decoder", "hf"])
def test_a_model_fine_tuned_on_bytes_keeps_the_token_ids_of_its_origin_but_not_its_tokenizer(
    workspace: Path, hf_model: Path, family: str
) -> None:
    (hf_model / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    section = ModelSection.model_validate({"family": family, "path": str(hf_model)})
    recipe = recipe_for(workspace, steps=1).model_copy(update={"model": section})
    folder = train_run(recipe, plan_for(recipe, grad_accum=1), workspace / "runs").model
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert not (folder / "tokenizer_config.json").exists()
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
