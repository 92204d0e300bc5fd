"""Qwen3-Next (linear and gated attention) trains as plain transformers does; the planner knows its size."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from tests.dist.test_hf import CPU, TOKENS, plan_of, unsharded
from tests.dist.test_hf_eager import TOLERANCE, summed_loss
from tests.ranks import run_ranks
from trimaran.core import ModelSection, Plan, UserError
from trimaran.models import outline_for, spec_of
from trimaran.nets import hf_network, open_hf_model
from trimaran.parallel import apply_plan, build_mesh
from trimaran.train import join_process_group, read_rank_info

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3-next")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3NextConfig(**SMALL)).save_pretrained(folder)
    return folder


def plain_gradients(folder: Path) -> dict[str, np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    summed_loss(model(input_ids=TOKENS).logits, TOKENS).backward()
    return {name: each.grad.numpy() for name, each in model.named_parameters()}


def gradients_under(folder: Path, plan: Plan) -> dict[str, np.ndarray]:
    join_process_group(read_rank_info(os.environ))
    ranks = build_mesh(plan.mesh, device_type="cpu")
    tokens = TOKENS.chunk(plan.mesh.dp)[ranks.data_rank]
    module, fill = open_hf_model(folder, trust_remote_code=False, seed=7)
    network = hf_network(module.train(), None)
    apply_plan(network, plan, ranks)
    fill(module, CPU)
    (summed_loss(network.forward({"tokens": tokens})[0], tokens) * plan.mesh.data).backward()
    gradients = ((name, each.grad) for name, each in module.named_parameters())
    return {name: unsharded(each).numpy() for name, each in gradients if each is not None}


def test_gradients_are_those_of_plain_transformers(folder: Path) -> None:
    (plain,) = run_ranks(1, plain_gradients, folder)
    plan = plan_of({"dp_shard": 2})
    for gradients in run_ranks(plan.mesh.world_size, gradients_under, folder, plan):
        assert gradients.keys() == plain.keys()
        for name, expected in plain.items():
            error = np.linalg.norm(gradients[name] - expected)
            assert error <= TOLERANCE * np.linalg.norm(expected) + 1e-6, name


def test_documents_of_a_row_are_refused(folder: Path) -> None:
    module, _ = open_hf_model(folder, trust_remote_code=False, seed=7)
    documents = torch.zeros_like(TOKENS)
    documents[:, 3:] = 1
    with pytest.raises(UserError, match="does not keep the documents of a row apart") as raised:
        hf_network(module.train(), None).forward({"tokens": TOKENS, "documents": documents})
    assert raised.value.code == "M058"


def test_planner_counts_its_parameters_and_the_decoder_refuses_it(folder: Path) -> None:
    outline = outline_for(ModelSection(family="hf", path=str(folder)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3NextConfig(**SMALL))
    assert outline.num_parameters == sum(each.numel() for each in model.parameters())
    assert [count for _, count in outline.main.runs] == [3, 1]
    with pytest.raises(UserError, match="qwen3_next") as raised:
        spec_of(ModelSection(path=str(folder)))
    assert raised.value.code == "M006"
