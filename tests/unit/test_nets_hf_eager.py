"""Architectures without SDPA run their eager attention, and documents never mix silently."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trimaran.core import UserError
from trimaran.models import OutlineLayer, outline_from_hf
from trimaran.nets import hf_model, hf_network, open_hf_model, uses_eager_attention

NONE: dict[str, Any] = {"attention_dropout": 0.0, "resid_dropout": 0.0, "embed_dropout": 0.0}
GPT_J = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64, "attn_pdrop": 0.0,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip
GPT_NEO = NONE | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64,
                  "attention_types": [[["global", "local"], 1]], "window_size": 8}  # fmt: skip
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
MPT = {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
RWKV = {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "context_length": 64}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
CONFIGS = {"gptj": GPT_J, "gpt_neo": GPT_NEO, "bloom": BLOOM, "mpt": MPT, "rwkv": RWKV, "mamba": MAMBA}
TOKENS = torch.arange(3, 35).view(2, 16)
OWN_CODE = """
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutput

class OwnConfig(PreTrainedConfig):
    model_type = "own"
    vocab_size: int = 64
    hidden_size: int = 32
    num_attention_heads: int = 4

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
    def get_input_embeddings(self):
        return self.embedding
    def get_output_embeddings(self):
        return self.head
    def forward(self, input_ids, use_cache=False):
        x = self.embedding(input_ids)
        scores = (x @ x.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), float("-inf"))
        return CausalLMOutput(logits=self.head(scores.softmax(-1) @ x))
"""
DOCUMENTS = torch.arange(16).ge(7).long().expand(2, 16)


def config_of(name: str, **fields: Any) -> Any:
    kind: Any = CONFIG_MAPPING[name]
    return kind(vocab_size=64, **fields)


def network_of(name: str) -> Any:
    config = config_of(name, **CONFIGS[name])
    torch.manual_seed(0)
    return hf_network(hf_model(config, trust_remote_code=False).eval(), None)


@pytest.mark.parametrize("name", ["gptj", "gpt_neo", "bloom", "mpt", "rwkv"])
def test_a_model_without_sdpa_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    network = network_of(name)
    network.module.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        ours, theirs = network.forward({"tokens": TOKENS})[0], plain(input_ids=TOKENS).logits
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("name", "warns"), [("gptj", True), ("mpt", True), ("rwkv", False), ("mamba", False)])
def test_a_warning_says_what_eager_attention_costs(name: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trimaran"):
        network_of(name)
    told = [each for each in caplog.messages if "eager attention" in each]
    assert len(told) == warns  # models without attention have no scores to keep
    assert all("heads x seq_len^2" in each and "\n" not in each for each in told)


def test_a_model_with_its_own_code_and_without_sdpa_is_built(tmp_path: Path) -> None:
    (tmp_path / "own_code.py").write_text(OWN_CODE)
    classes = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    module, fill = open_hf_model(tmp_path, trust_remote_code=True, seed=0)
    assert all(each.is_meta for each in module.parameters()), "no rank loads the full model"
    network = hf_network(module, None)
    fill(module, torch.device("cpu"))
    assert uses_eager_attention(module)
    assert torch.equal(network.forward({"tokens": TOKENS})[0], module(TOKENS).logits)


@pytest.mark.parametrize("name", ["gptj", "gpt_neo"])
def test_eager_attention_keeps_documents_apart(name: str) -> None:
    network = network_of(name)
    with torch.no_grad():
        packed = network.forward({"tokens": TOKENS, "documents": DOCUMENTS})[0]
        for part in (slice(0, 7), slice(7, 16)):
            alone = network.forward({"tokens": TOKENS[:, part]})[0]
            torch.testing.assert_close(packed[:, part], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["bloom", "mpt", "rwkv", "mamba"])
def test_a_model_that_would_mix_documents_refuses_them(name: str) -> None:
    network, labels = network_of(name), torch.ones_like(TOKENS)
    with pytest.raises(UserError, match="does not keep the documents of a row apart") as error:
        network.forward({"tokens": TOKENS, "documents": DOCUMENTS, "labels": labels})
    assert error.value.code == "M058"
    padded = labels.masked_fill(DOCUMENTS.bool(), -100)  # what follows the first document is padding
    with torch.no_grad():
        ours = network.forward({"tokens": TOKENS, "documents": DOCUMENTS, "labels": padded})[0]
        alone = network.forward({"tokens": TOKENS[:, :7]})[0]
    torch.testing.assert_close(ours[:, :7], alone, atol=1e-5, rtol=1e-4)


def test_the_experts_of_hunyuan_are_read() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"intermediate_size": 48, "num_experts": 4, "moe_topk": 2, "head_dim": 8}
    config = config_of("hunyuan_v1_moe", pad_token_id=0, **sizes, **experts)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    outline = outline_from_hf(config.to_dict(), where="config.json", name="hunyuan")
    layer = outline.main.runs[0][0]
    assert isinstance(layer, OutlineLayer)
    assert layer.experts is not None
    assert (layer.experts.num_experts, layer.experts.top_k) == (4, 2)
    assert outline.num_parameters == sum(each.numel() for each in model.parameters())
    listed = outline_from_hf(config.to_dict() | {"moe_topk": [2, 2]}, where="config.json", name="hunyuan")
    assert listed == outline
