"""Adapters train the same under every plan, and as PEFT trains them."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests import vlm_training
from tests.cases import slow
from tests.hf_models import save_model
from tests.parity import plan_for
from tests.plan_training import (
    GLOBAL_BATCH,
    STEPS,
    Trace,
    assert_each_trains_as_one_process,
    assert_same_training,
    batch_of,
    recipe_of,
    train_all_ranks,
    train_alone,
    train_rank,
)
from tests.ranks import run_ranks
from trimaran.core import AdapterSection, Plan, Recipe
from trimaran.data import DataShare
from trimaran.nets import full_tensor
from trimaran.parallel import build_mesh
from trimaran.train import build_networks, join_process_group, read_rank_info

SHAPE = {"layers": 2, "hidden": 32, "heads": 8, "kv_heads": 4, "head_dim": 8, "ffn": 64}
ONE_PROCESS = Plan(micro_batch=GLOBAL_BATCH)
TINY = {"preset": "tiny", "shape": SHAPE | {"tied": True}}
DEEP = {"preset": "tiny", "shape": SHAPE | {"tied": True, "layers": 4}}  # for two stages on each of two ranks
SMALL = {"preset": "tiny", "shape": SHAPE | {"tied": True, "layers": 1, "vocab": 32}}  # for 16 bits, which are slow
MIXTURE = {"preset": "tiny-moe", "shape": SHAPE}
LORA, DORA = {"kind": "lora"}, {"kind": "dora"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(name, root / name) for name in ("llama", "llama-tied", "qwen2", "phi3", "qwen3-moe")}


TWO_RANKS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (TINY, LORA, {"dp_replicate": 2, "grad_accum": 2}),
    (TINY, LORA, {"dp_shard": 2, "grad_accum": 2}),
    (TINY, DORA, {"tp": 2}),
    (TINY, LORA, {"cp": 2}),
    (DEEP, LORA | {"train": ("lm_head",)}, {"pp": 2, "grad_accum": 4}),
    (MIXTURE, LORA, {"dp_shard": 2, "ep": 2}),
]
# Products of axes, and other schedules and shardings, are in `tests.matrix.ADAPTERS`.
SLOW_ON_TWO_RANKS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (TINY, LORA | {"dropout": 0.3}, {"tp": 2}),
    (TINY, DORA, {"dp_shard": 2, "recompute": "full"}),
    (TINY, LORA, {"dp_shard": 2, "recompute": "full", "offload": "parameters"}),
    (TINY, LORA, {"dp_shard": 2, "offload": "optimizer"}),
    (TINY, LORA, {"dp_replicate": 2, "offload": "activations"}),
    (DEEP, LORA | {"train": ("embed_tokens",)}, {"pp": 2, "grad_accum": 4, "pipeline": {"schedule": "zero-bubble"}}),
    (DEEP, LORA | {"train": ("lm_head", "norm")}, {"dp_shard": 2}),
    (MIXTURE, DORA, {"tp": 2}),
]


@pytest.mark.parametrize("cases", [TWO_RANKS, slow(SLOW_ON_TWO_RANKS)], ids=["quick", "slow"])
def test_an_adapter_of_a_decoder_trains_as_in_one_process(
    cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]],
) -> None:
    assert_each_trains_as_one_process(
        [with_plan(recipe_of(model, adapter), fields) for model, adapter, fields in cases]
    )


def with_plan(recipe: Recipe, fields: dict[str, Any]) -> tuple[Recipe, Plan]:
    return recipe, plan_for(recipe, **{"grad_accum": 1} | fields)


HF_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", LORA, {"tp": 2}),
    ("llama-tied", LORA, {"pp": 2, "grad_accum": 2}),  # every layer has a bias
    ("phi3", DORA, {"tp": 2}),  # packed projections
]
SLOW_HF_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", LORA, {"dp_shard": 2, "grad_accum": 2}),
    ("qwen2", DORA, {"tp": 2}),
    ("llama-tied", DORA, {"tp": 2}),
    ("llama", LORA, {"cp": 2}),
    ("llama-tied", LORA | {"train": ("lm_head",)}, {"pp": 2, "grad_accum": 2}),
    ("llama-tied", DORA, {"pp": 2, "grad_accum": 4, "pipeline": {"schedule": "gpipe"}}),
    ("qwen3-moe", LORA, {"tp": 2}),
    ("qwen3-moe", LORA, {"dp_shard": 2, "ep": 2}),
]
HF_ON_FOUR_RANKS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama-tied", LORA, {"dp_shard": 2, "tp": 2}),
    ("phi3", LORA, {"pp": 2, "tp": 2, "grad_accum": 2}),
    ("qwen3-moe", LORA, {"dp_shard": 2, "tp": 2, "ep": 2}),
    ("qwen3-moe", LORA, {"pp": 2, "dp_shard": 2, "ep": 2, "grad_accum": 2}),
]


@pytest.mark.parametrize(
    "cases", [HF_CASES, slow(SLOW_HF_CASES), slow(HF_ON_FOUR_RANKS)], ids=["quick", "slow", "4 ranks"]
)
def test_an_adapter_of_a_hugging_face_model_trains_as_in_one_process(
    folders: dict[str, Path], cases: list[tuple[str, dict[str, Any], dict[str, Any]]]
) -> None:
    assert_each_trains_as_one_process(
        [
            with_plan(recipe_of({"family": "hf", "path": str(folders[name])}, adapter), fields)
            for name, adapter, fields in cases
        ]
    )


VLM_ADAPTERS = {
    "both": AdapterSection(rank=4, towers=("vision", "language"), train=("projector",)),
    "language": AdapterSection(rank=4, kind="dora"),
}
VLM_CASES = [
    slow(("language", {"mesh": {"dp_replicate": 2}})),
    slow(("language", {"mesh": {"pp": 2}, "grad_accum": 4})),
    slow(("language", {"mesh": {"tp": 2}, "towers": {"vision": {"tp": 1}}})),
    slow(("both", {"mesh": {"dp_shard": 2}, "sharding": "parameters"})),
    ("both", {"mesh": {"tp": 2}}),
    slow(("both", {"mesh": {"tp": 2}, "towers": {"vision": {"tp": 1}}})),
    slow(("both", {"mesh": {"pp": 2}, "grad_accum": 4})),
    slow(("both", {"mesh": {"pp": 2, "dp_shard": 2}, "sharding": "optimizer", "grad_accum": 4})),
]


@pytest.mark.parametrize(("adapter", "fields"), VLM_CASES, ids=str)
def test_an_adapter_of_a_vision_language_model_trains_as_in_one_process(adapter: str, fields: dict[str, Any]) -> None:
    plan = vlm_training.plan_of(**fields)
    traces = vlm_training.train_all_ranks(vlm_training.SPEC, plan, adapter=VLM_ADAPTERS[adapter])
    vlm_training.assert_traces_match(traces, vlm_alone(adapter))


@cache
def vlm_alone(adapter: str) -> vlm_training.TrainingTrace:
    (trace,) = vlm_training.train_all_ranks(vlm_training.SPEC, vlm_training.plan_of(), adapter=VLM_ADAPTERS[adapter])
    return trace


def test_dropout_changes_training_and_recompute_drops_the_same_elements() -> None:
    recipe, plain = (recipe_of(TINY, LORA | {"dropout": each}) for each in (0.3, 0.0))
    with_dropout, without = train_alone([recipe, plain])
    assert with_dropout.losses != without.losses
    (recomputed,) = train_all_ranks(recipe, ONE_PROCESS.model_copy(update={"recompute": "full"}))
    assert_same_training([recomputed], with_dropout)


@pytest.mark.parametrize(
    "fields",
    [{"dp_shard": 2, "grad_accum": 2}, slow({"dp_replicate": 2}), slow({"tp": 2}), slow({"dp_shard": 2, "tp": 2})],
    ids=str,
)
def test_frozen_weights_are_16_bits_wide_everywhere_and_start_equal(fields: dict[str, Any]) -> None:
    recipe = recipe_of(SMALL, LORA)
    plan = plan_for(recipe, precision="bf16", **{"grad_accum": 1} | fields)
    (alone,) = run_ranks(1, stored_weights, recipe, ONE_PROCESS.model_copy(update={"precision": "bf16"}))
    for losses, stored in run_ranks(plan.mesh.world_size, stored_weights, recipe, plan):
        assert losses == pytest.approx(alone[0], rel=2e-3)
        for name, (dtype, value) in stored.items():
            assert dtype == ("float32" if "lora" in name else "bfloat16"), name
            np.testing.assert_array_equal(value, alone[1][name][1], err_msg=name)


def stored_weights(recipe: Recipe, plan: Plan) -> tuple[list[float], dict[str, tuple[str, np.ndarray]]]:
    """Return the losses, and the dtype and the first full value of each parameter of this rank."""
    join_process_group(read_rank_info(os.environ))
    networks = build_networks(recipe, plan, read_rank_info(os.environ), build_mesh(plan.mesh, device_type="cpu"))
    named = [pair for network in networks for pair in network.module.named_parameters()]
    stored = {name: (str(each.dtype)[6:], full_tensor(each).float().numpy().copy()) for name, each in named}
    return train_rank(recipe, plan).losses, stored


@pytest.mark.slow  # the compiler takes a minute
@pytest.mark.parametrize(("adapter", "fields"), [(LORA, {"dp_shard": 2}), (DORA, {"tp": 2})], ids=str)
def test_compiled_blocks_train_an_adapter_as_one_process_does(adapter: dict[str, Any], fields: dict[str, Any]) -> None:
    assert_each_trains_as_one_process([with_plan(recipe_of(TINY, adapter), {"compile": True} | fields)])


def test_an_adapter_of_the_head_is_not_left_out_of_a_fused_loss() -> None:
    recipe = recipe_of({"preset": "tiny", "shape": SHAPE | {"tied": False}}, LORA | {"targets": ("lm_head", "q_proj")})
    assert_each_trains_as_one_process([with_plan(recipe, {"loss": "chunked"})])


# PEFT's own options for the adapters below; the rest is `recipe_of`'s.
PEFT_CASES = [
    ("llama", LORA, {}),
    ("llama", LORA | {"rank_stabilised": True, "targets": ("q_proj", "v_proj")}, {"use_rslora": True}),
    ("qwen2", DORA, {"use_dora": True}),  # with biases
    ("llama", LORA | {"train": ("lm_head",)}, {"modules_to_save": ["lm_head"]}),
]


@pytest.mark.parametrize("family", ["hf", "decoder"])
def test_an_adapter_trains_as_with_peft_and_plain_pytorch(folders: dict[str, Path], family: str) -> None:
    cases = [
        (recipe_of({"family": family, "path": str(folders[name])}, adapter), folders[name], options)
        for name, adapter, options in PEFT_CASES
    ]
    (results,) = run_ranks(1, train_both_in_turn, cases)
    for (ours, losses, norms, weights), (name, adapter, _) in zip(results, PEFT_CASES, strict=True):
        message = f"{name} {adapter}"
        np.testing.assert_allclose(ours.losses, losses, rtol=1e-6, err_msg=message)
        np.testing.assert_allclose(ours.norms, norms, rtol=2e-6, err_msg=message)
        assert ours.losses[-1] < ours.losses[0], message
        assert ours.weights.keys() == weights.keys(), message
        for each, value in weights.items():
            off = np.linalg.norm(ours.weights[each] - value) / np.linalg.norm(value)
            assert off <= 5e-6, f"{message}: {each} is off by {off:.1e}"


def train_both_in_turn(cases: list[tuple[Recipe, Path, dict[str, Any]]]) -> list[Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    return [train_both(*case) for case in cases]


def train_both(
    recipe: Recipe, folder: Path, options: dict[str, Any]
) -> tuple[Trace, list[float], list[float], dict[str, np.ndarray]]:
    """Return our trace, and the losses, gradient norms and final weights, under our names, of PEFT in a plain loop."""
    ours, section = train_rank(recipe, ONE_PROCESS), recipe.model.adapter
    assert section is not None
    targets = section.targets if isinstance(section.targets, str) else list(section.targets)
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        LoraConfig(r=section.rank, lora_alpha=section.alpha, target_modules=targets, **options),  # pyrefly: ignore
    )
    trained = {_our_name(name, ours): each for name, each in model.named_parameters() if each.requires_grad}
    assert trained.keys() == ours.first.keys()
    with torch.no_grad():
        for name, each in trained.items():
            if name.endswith("lora_A"):
                each.copy_(torch.from_numpy(ours.first[name]))
            np.testing.assert_allclose(each.numpy(), ours.first[name], rtol=1e-6, err_msg=name)
    losses, norms = _plain_loop(model, recipe, trained)
    return ours, losses, norms, {name: each.detach().numpy() for name, each in trained.items()}


def _our_name(name: str, ours: Trace) -> str:
    """Return our name of a PEFT parameter: that of the Hugging Face model, or without `model.` in our decoder."""
    for theirs, mine in (
        ("base_model.model.", ""),
        (".lora_A.default.weight", ".lora_A"),
        (".lora_B.default.weight", ".lora_B"),
        (".lora_magnitude_vector.default.weight", ".lora_magnitude"),
        (".modules_to_save.default", ""),
    ):
        name = name.replace(theirs, mine)
    return name if name in ours.first else name.removeprefix("model.")


def _plain_loop(
    model: torch.nn.Module, recipe: Recipe, trained: dict[str, torch.nn.Parameter]
) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of a plain training loop on the same batches."""
    train, constants = recipe.train, recipe.train.optimizer
    groups = [
        {"params": [each for each in trained.values() if each.ndim > 1], "weight_decay": constants.weight_decay},
        {"params": [each for each in trained.values() if each.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=(constants.beta1, constants.beta2), eps=constants.eps)
    share = DataShare(rank=0, dp=1, micro_batch=GLOBAL_BATCH, grad_accum=1)
    model.train()
    losses, norms = [], []
    for step in range(STEPS):
        inputs = batch_of(step, share).micro(0)
        positions, mask = _documents(inputs["documents"])
        logits = model(input_ids=inputs["tokens"], position_ids=positions, attention_mask=mask).logits
        loss = F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), ignore_index=-100)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), train.clip_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def _documents(documents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions that restart in each document, and a causal mask [B, 1, T, T] inside each."""
    length = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    allowed = same & torch.ones(length, length, dtype=torch.bool).tril()
    return allowed.sum(-1) - 1, allowed[:, None]
