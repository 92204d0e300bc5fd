"""Folders of many kinds of Hugging Face models: trained as transformers computes them, or refused with a code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AfmoeConfig, GptOssConfig

from tests.hf_models import CONFIGS, SMALL
from trimaran.nets.hf import HfNetwork, hf_network
from trimaran.nets.hf_build import open_hf_model

CPU = torch.device("cpu")
WINDOWS: dict[str, Any] = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
AFMOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
# These build their masks without the positions of documents.
WITHOUT_POSITIONS = {
    "gpt_oss": GptOssConfig(**SMALL, **EXPERTS, **WINDOWS),
    "afmoe": AfmoeConfig(**SMALL, **AFMOE, **WINDOWS),
}
TOKENS = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 9, [0] * 4 + [1] * 12])
STARTS = (7, 4)


def network_of(config: Any, folder: Path) -> HfNetwork:
    config.save_pretrained(folder)
    module, fill = open_hf_model(folder, trust_remote_code=False, seed=0)
    network = hf_network(module.train(), None)
    fill(module, CPU)
    return network


@torch.no_grad()
def logits_alone(network: HfNetwork) -> list[Tensor]:
    """Return the logits of the second document of each row, computed by the model alone."""
    pairs = zip(TOKENS, STARTS, strict=True)
    return [network.module(input_ids=row[None, start:], use_cache=False).logits[0] for row, start in pairs]


@torch.no_grad()
def logits_packed(network: HfNetwork) -> list[Tensor]:
    """Return the logits of the second document of each row, computed in the packed row."""
    logits = network.forward({"tokens": TOKENS, "documents": DOCUMENTS})[0]
    return [row[start:] for row, start in zip(logits, STARTS, strict=True)]


@pytest.mark.parametrize("name", [*WITHOUT_POSITIONS, "mistral", "gemma3"])
def test_a_packed_document_has_the_logits_that_it_has_alone(name: str, tmp_path: Path) -> None:
    network = network_of((WITHOUT_POSITIONS | CONFIGS)[name], tmp_path)
    for packed, alone in zip(logits_packed(network), logits_alone(network), strict=True):
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)
