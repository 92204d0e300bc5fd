"""How a Hugging Face model is sped up: its head, our attention in it, its residual stream, and compiled blocks."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from tests.hf_models import CONFIGS, NARROW, SMALL, UNDROPPED
from trimaran.core import Plan
from trimaran.models import outline_from_hf
from trimaran.nets import HfNetwork, hf_network, takes_scope
from trimaran.train import build_loss_head

ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE: dict[str, Any] = SMALL | {"head_dim": 8} | ENDS
FEW: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4} | ENDS
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
SPARSE: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
MORE: dict[str, Any] = {
    "gemma": GemmaConfig(**WIDE),
    "gemma2": Gemma2Config(**WIDE),
    "cohere": CohereConfig(**SMALL, **ENDS),
    "cohere2": Cohere2Config(**SMALL, **ENDS),
    "granite": GraniteConfig(**SMALL, **ENDS, logits_scaling=4.0),
    "gemma2-uncapped": Gemma2Config(**WIDE, final_logit_softcapping=None),
    "gpt2-padded": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, **UNDROPPED, **ENDS),
    "phi": PhiConfig(**NARROW, **ENDS),
    "opt": OPTConfig(**FEW, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0),
    "falcon": FalconConfig(**FEW),
    "olmo2": Olmo2Config(**SMALL, **ENDS),
    "starcoder2": Starcoder2Config(**SMALL, **ENDS),
    "stablelm": StableLmConfig(**SMALL, **ENDS),
    "smollm3": SmolLM3Config(**SMALL, **ENDS),
    "glm4": Glm4Config(**WIDE),
    "deepseek3": DeepseekV3Config(**NARROW, **ENDS, **LATENT, **SPARSE, first_k_dense_replace=1),
    "llama-dropped": LlamaConfig(**SMALL, attention_dropout=0.1),
}
ALL = CONFIGS | MORE
CHANGED = {"gemma2", "cohere", "cohere2", "granite"}  # these scale or cap the logits after the head
OWN_ATTENTION = {
    "mistral",
    "gemma3",
    "gemma2",
    "gemma2-uncapped",
    "cohere2",
    "falcon",
    "stablelm",
    "deepseek3",
    "llama-dropped",
}
TOKENS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))
LENGTHS = ((5, 19), (12, 12))
DOCUMENTS = torch.stack([torch.arange(2).repeat_interleave(torch.tensor(row)) for row in LENGTHS])


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(deepcopy(ALL[name]), dtype=torch.float32)


@pytest.mark.parametrize("name", ALL)
def test_a_head_is_reported_only_if_the_logits_are_its_output_and_config_json_says_whether_it_can_have_the_loss(
    name: str,
) -> None:
    model = model_of(name)
    network = hf_network(model, None)
    assert network.head is (None if name in CHANGED else model.get_output_embeddings())
    assert takes_scope(model) == (name not in OWN_ATTENTION)
    fused = build_loss_head(network, Plan(loss="fused")) is not None
    assert fused == (name not in CHANGED | {"phi"}), "a head with a bias is more than a matmul"
    for config in (ALL[name].to_dict(), ALL[name].to_diff_dict()):  # complete, and as it is saved
        assert outline_from_hf(config, where="config.json", name=name).main.bare_head == fused
    if network.head is not None:
        loss_output = torch.zeros(1 + TOKENS.numel())  # as a head with a fused loss returns it
        network.head.forward = lambda _: loss_output
        with torch.no_grad():
            assert network.forward({"tokens": TOKENS})[0] is loss_output


@pytest.mark.parametrize("name", [each for each in ALL if each not in OWN_ATTENTION])
def test_our_attention_equals_that_of_transformers_and_separates_documents(name: str) -> None:
    model = model_of(name).eval()
    with torch.no_grad():
        theirs = model(TOKENS).logits
        network = hf_network(model, None)
        torch.testing.assert_close(network.forward({"tokens": TOKENS})[0], theirs, atol=1e-6, rtol=1e-5)
        packed = network.forward({"tokens": TOKENS, "documents": DOCUMENTS})[0]
        for row, lengths in enumerate(LENGTHS):
            alone = [network.forward({"tokens": each[None]})[0][0] for each in TOKENS[row].split(lengths)]
            torch.testing.assert_close(packed[row], torch.cat(alone), atol=2e-6, rtol=1e-4)


def streams(network: HfNetwork) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Return the dtypes of the inputs of the blocks, and of their rotation."""
    dtypes: tuple[set[torch.dtype], set[torch.dtype]] = set(), set()

    def record(_: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        dtypes[0].add(args[0].dtype)
        dtypes[1].update(each.dtype for each in options["position_embeddings"])

    handles = [block.register_forward_pre_hook(record, with_kwargs=True) for block in network.blocks]
    with torch.no_grad():
        network.forward({"tokens": TOKENS})
    for handle in handles:
        handle.remove()
    return dtypes


@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "phi"])
def test_the_residual_stream_has_the_matmul_dtype_and_the_rotation_is_fp32(name: str) -> None:
    network = hf_network(model_of(name), None)
    assert streams(network) == ({torch.float32}, {torch.float32})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert streams(network) == ({torch.bfloat16}, {torch.float32})


def test_blocks_compile_once_for_all_layers_without_graph_breaks() -> None:
    config = Qwen2Config(**SMALL | {"num_hidden_layers": 4})
    network = hf_network(AutoModelForCausalLM.from_config(config, dtype=torch.float32), None)
    torch.compiler.reset()
    counters.clear()
    for block in network.blocks:
        block.compile(backend="eager", fullgraph=True)
    for split in (3, 7, 11):
        documents = (torch.arange(24) >= split).long().expand(2, 24)
        inputs = {"tokens": TOKENS, "documents": documents, "host_documents": documents}
        network.forward(inputs)[0].sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch.compiler.reset()


def test_a_model_that_does_not_run_on_meta_keeps_its_own_attention_and_head(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("llama")
    model.model.forward = lambda tokens: tokens  # takes no options
    with caplog.at_level("INFO"):
        network = hf_network(model, None)
    assert network.head is None
    assert not takes_scope(model)
    assert "does not run on the meta device" in caplog.text
