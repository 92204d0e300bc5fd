"""Hugging Face models that use weights twice, or have layers of unusual kinds, train under plans as on one process."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DogeConfig,
    Lfm2MoeConfig,
    RobertaConfig,
    XLMRobertaXLConfig,
    Zamba2Config,
    ZambaConfig,
)

from tests.cases import slow
from tests.dist.test_hf import CPU, plan_of, unsharded
from tests.dist.test_hf_pipeline import recipe_for
from tests.hf_models import NARROW, SMALL
from tests.parity import assert_same_trajectory, plan_for, train_trajectory
from tests.ranks import run_ranks
from tests.sweep_models import tiny_config
from trimaran.core import Plan, UserError
from trimaran.nets import Context, hf_network, open_hf_model
from trimaran.parallel import apply_plan, build_mesh
from trimaran.train import join_process_group, read_rank_info

TOKENS = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(1))
TOLERANCE = 1e-5
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODER: dict[str, Any] = NARROW | NO_DROPOUT | {"is_decoder": True, "pad_token_id": 1}
HYBRID: dict[str, Any] = NARROW | {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "mamba_d_state": 8,
    "n_mamba_heads": 4,
    "use_mamba_kernels": False,
}
# In BERT and its kind the head is tied to an embedding that is in a block; in Zamba layers share a transformer.
SHARED = {
    "bert": BertConfig(**DECODER),
    "roberta": RobertaConfig(**DECODER),
    "xlm-roberta-xl": XLMRobertaXLConfig(**DECODER),
    "zamba": ZambaConfig(**HYBRID),
    "zamba2": Zamba2Config(**HYBRID, mamba_ngroups=1, chunk_size=8, adapter_rank=4),
}

Gradients = dict[str, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    for name, config in SHARED.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return folder


def summed_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="sum")


def plain_gradients(folder: Path, names: tuple[str, ...]) -> Gradients:
    found = {}
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(folder / name).train()
        summed_loss(model(input_ids=TOKENS, use_cache=False).logits, TOKENS).backward()
        found[name] = {each: tensor.grad.numpy() for each, tensor in model.named_parameters() if tensor.requires_grad}
    return found


def gradients_under(folder: Path, names: tuple[str, ...], plans: list[Plan]) -> list[Gradients]:
    join_process_group(read_rank_info(os.environ))
    return [gradients_of(folder, names, plan) for plan in plans]


def gradients_of(folder: Path, names: tuple[str, ...], plan: Plan) -> Gradients:
    ranks, found = build_mesh(plan.mesh, device_type="cpu"), {}
    tokens = TOKENS.chunk(plan.mesh.dp)[ranks.data_rank]
    for name in names:
        module, fill = open_hf_model(folder / name, trust_remote_code=False, seed=7)
        network = hf_network(module.train(), None)
        apply_plan(network, plan, ranks)
        fill(module, CPU)
        # Gradients are averaged over the data-parallel ranks.
        (summed_loss(network.forward({"tokens": tokens})[0], tokens) * plan.mesh.data).backward()
        gradients = ((each, tensor.grad) for each, tensor in module.named_parameters())
        found[name] = {each: unsharded(tensor).numpy() for each, tensor in gradients if tensor is not None}
    return found


@pytest.mark.parametrize("names", [("bert", "zamba2"), slow((("roberta", "xlm-roberta-xl", "zamba"),))])
def test_weights_that_are_used_twice_have_the_gradients_of_plain_transformers(
    names: tuple[str, ...], models: Path
) -> None:
    (plain,) = run_ranks(1, plain_gradients, models, names)
    plans = [plan_of({"dp_shard": 2}), plan_of({"dp_shard": 2}, recompute="full")]
    for gradients_by_plan in run_ranks(2, gradients_under, models, names, plans):
        for gradients, plan in zip(gradients_by_plan, plans, strict=True):
            for name in names:
                assert gradients[name].keys() == plain[name].keys()
                for each, expected in plain[name].items():
                    error = np.linalg.norm(gradients[name][each] - expected)
                    # The small sum is for gradients that cancel to nearly 0.
                    assert error <= TOLERANCE * np.linalg.norm(expected) + 1e-5, f"{name} {each} under {plan}"


def test_replicas_of_a_model_with_unused_parameters_train_as_one_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("longcat_flash"))
    model.save_pretrained(tmp_path / "model")
    recipe = recipe_for(tmp_path / "model", tmp_path, isolated=False)
    (tmp_path / "runs").mkdir()
    alone, replicas = (
        train_trajectory(recipe, plan_for(recipe, grad_accum=2, **mesh), tmp_path / "runs")
        for mesh in ({}, {"dp_replicate": 2})
    )
    assert_same_trajectory(replicas, alone)


def test_plans_that_a_model_cannot_follow_are_refused(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1}
    Lfm2MoeConfig(**SMALL, **experts, layer_types=["conv", "full_attention"]).save_pretrained(tmp_path / "lfm2")
    DogeConfig(**SMALL).save_pretrained(tmp_path / "doge")
    lfm2, doge = (open_hf_model(tmp_path / name, trust_remote_code=False, seed=0)[0] for name in ("lfm2", "doge"))
    with pytest.raises(UserError, match=r"M026.*the convolution model\.layers\.\*\.conv\.conv"):
        hf_network(lfm2.train(), None).tensor_plan(2)
    with pytest.raises(UserError, match=r"M028.*masks of its own"):
        hf_network(doge.train(), None).use_context(Context())
