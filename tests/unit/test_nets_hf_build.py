"""Hugging Face models built on the meta device: their weights, their tensor-parallel plan, and refused models."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Model, LlamaConfig

from tests.hf_models import CONFIGS, SMALL, save_model
from tests.hf_pipeline_models import save_config
from trimaran.core import UserError
from trimaran.nets import Context, HfNetwork, hf_network, open_hf_model

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))


def opened_model(folder: Path, seed: int = 0) -> nn.Module:
    module, fill = open_hf_model(folder, trust_remote_code=False, seed=seed)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    fill(module, CPU)
    return module


def meta_network(name: str, folder: Path) -> HfNetwork:
    CONFIGS[name].save_pretrained(folder)
    module, _ = open_hf_model(folder, trust_remote_code=False, seed=0)
    return hf_network(module.eval(), None)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_read_from_disk_equal_those_that_transformers_loads(name: str, tmp_path: Path) -> None:
    module = opened_model(save_model(name, tmp_path))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert [each for each, _ in module.named_parameters()] == [each for each, _ in theirs.named_parameters()]
    assert all(torch.equal(*pair) for pair in zip(module.buffers(), theirs.buffers(), strict=True))
    assert module.training == theirs.training
    with torch.no_grad():
        assert torch.equal(module(TOKENS).logits, theirs(TOKENS).logits)


@pytest.mark.parametrize("name", ["llama-tied", "gemma3", "gpt2", "qwen3-moe"])
def test_random_weights_depend_on_the_seed_and_are_distributed_as_in_transformers(name: str, tmp_path: Path) -> None:
    CONFIGS[name].save_pretrained(tmp_path)
    one, same, other = (opened_model(tmp_path, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIGS[name])
    assert all(torch.equal(*pair) for pair in zip(opened_model(tmp_path).buffers(), theirs.buffers(), strict=True))
    for each, parameter in theirs.named_parameters():
        tensor = parameter.detach()
        if tensor.unique().numel() == 1:
            assert torch.equal(one[each], tensor), each
        else:
            assert not torch.equal(one[each], other[each]), each
            assert one[each].std().item() == pytest.approx(tensor.std().item(), rel=0.25), each
            assert one[each].mean().item() == pytest.approx(tensor.mean().item(), abs=0.01), each


def test_weights_of_many_files_and_another_dtype_are_read_as_fp32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = AutoModelForCausalLM.from_config(CONFIGS["llama"]).to(torch.bfloat16)
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    module = opened_model(tmp_path)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert all(torch.equal(each, saved.state_dict()[name].float()) for name, each in module.state_dict().items())


def test_weights_that_were_saved_without_their_head_are_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    body = GPT2Model(CONFIGS["gpt2"])
    body.save_pretrained(tmp_path)
    module = opened_model(tmp_path)
    assert torch.equal(module.get_parameter("lm_head.weight"), body.wte.weight)


def test_a_model_that_cannot_be_built_on_meta_is_loaded_unsharded_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model("llama-tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    # transformers ties a head that is also on disk only if the two are equal
    save_file(tensors | {"lm_head.weight": torch.ones(96, 32)}, tmp_path / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        module, fill = open_hf_model(tmp_path, trust_remote_code=False, seed=0)
    assert "is twice on disk" in caplog.text
    fill(module, CPU)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(module.get_parameter("lm_head.weight"), theirs.lm_head.weight)


def test_damaged_missing_and_misshapen_weights_are_clear_errors(tmp_path: Path) -> None:
    file = save_model("llama", tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:1000])
    with pytest.raises(UserError, match="M022"):
        opened_model(tmp_path)
    file.write_bytes(content)
    LlamaConfig(**SMALL | {"num_hidden_layers": 3}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"M021.*layers\.2"):
        opened_model(tmp_path)
    LlamaConfig(**SMALL | {"intermediate_size": 64}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="M024"):
        opened_model(tmp_path)


UNINITIALISED = """
from transformers import LlamaForCausalLM

class Uninitialised(LlamaForCausalLM):
    def _init_weights(self, module):
        pass
"""


def test_weights_that_the_model_does_not_initialise_are_refused(tmp_path: Path) -> None:
    fields = CONFIGS["llama"].to_dict() | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Uninitialised"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "modeling_own.py").write_text(UNINITIALISED)
    module, fill = open_hf_model(tmp_path, trust_remote_code=True, seed=0)
    with pytest.raises(UserError, match=r"M029.*does not initialise lm_head"):
        fill(module, CPU)


def test_a_tensor_plan_names_every_module_that_has_parameters(tmp_path: Path) -> None:
    plan = meta_network("qwen3", tmp_path).tensor_plan(2)
    assert plan == {
        "model.embed_tokens": "embedding",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.self_attn.q_norm": "heads",
        "model.layers.*.self_attn.k_norm": "heads",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "model.layers.*.input_layernorm": "replicated",
        "model.layers.*.post_attention_layernorm": "replicated",
        "model.norm": "replicated",
        "lm_head": "colwise-logits",
    }


def test_head_norms_need_no_entry_in_the_transformers_plan(tmp_path: Path) -> None:
    network = meta_network("qwen3", tmp_path)
    for norm in ("q_norm", "k_norm"):  # transformers 4 omits them
        network.module._tp_plan.pop(f"model.layers.*.self_attn.{norm}", None)  # pyrefly: ignore[missing-attribute]
    assert network.tensor_plan(2)["model.layers.*.self_attn.q_norm"] == "heads"


def test_a_vocabulary_that_the_degree_does_not_divide_is_sharded_too(tmp_path: Path) -> None:
    plan = meta_network("llama-odd", tmp_path).tensor_plan(2)
    assert (plan["model.embed_tokens"], plan["lm_head"]) == ("embedding", "colwise-logits")


@pytest.mark.parametrize(
    ("name", "part", "style"),
    [
        ("gpt2", "transformer.h.*.attn.c_attn", "foreign-colwise-gathered"),
        ("gpt2", "transformer.h.*.mlp.c_proj", "foreign-rowwise"),
        ("phi3", "model.layers.*.self_attn.o_proj", "foreign-rowwise-taken"),
        ("qwen3-moe", "model.layers.*.mlp.experts", "foreign-experts"),
        ("qwen3-moe", "model.layers.*.mlp.gate", "foreign-replicated"),
    ],
)
def test_packed_projections_and_stacked_experts_have_styles(name: str, part: str, style: str, tmp_path: Path) -> None:
    assert meta_network(name, tmp_path).tensor_plan(2)[part] == style


def test_a_model_without_a_tensor_parallel_plan_is_refused(tmp_path: Path) -> None:
    save_config("bloom", tmp_path)
    module, _ = open_hf_model(tmp_path, trust_remote_code=False, seed=0)
    with pytest.raises(UserError, match=r"M026.*has no tensor-parallel plan"):
        hf_network(module.eval(), None).tensor_plan(2)


def test_a_degree_that_does_not_divide_is_refused_with_the_size_and_valid_degrees(tmp_path: Path) -> None:
    network = meta_network("llama", tmp_path)
    with pytest.raises(UserError, match=r"M027.*num_key_value_heads \(2\)[\s\S]*tp of 1 or 2"):
        network.tensor_plan(4)
    with pytest.raises(UserError, match=r"M027.*num_attention_heads \(4\)"):
        network.tensor_plan(3)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_attention_windows_do_not_support_context_parallelism(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"M028.*has attention windows"):
        meta_network(name, tmp_path).use_context(Context())


def test_attention_dropout_does_not_support_context_parallelism(tmp_path: Path) -> None:
    LlamaConfig(**SMALL, attention_dropout=0.1).save_pretrained(tmp_path)
    network = hf_network(open_hf_model(tmp_path, trust_remote_code=False, seed=0)[0], None)
    with pytest.raises(UserError, match=r"M028.*has attention dropout"):
        network.use_context(Context())
    network.module.eval()
    network.use_context(Context())


def test_a_model_without_sdpa_keeps_its_own_attention(tmp_path: Path) -> None:
    Gemma2Config(**SMALL, head_dim=8, sliding_window=6).save_pretrained(tmp_path)
    module, fill = open_hf_model(tmp_path, trust_remote_code=False, seed=0)
    network = hf_network(module, None)
    fill(module, torch.device("cpu"))
    tokens, documents = torch.arange(3, 19)[None], torch.arange(16).ge(7).long()[None]
    with torch.no_grad():
        packed = network.forward({"tokens": tokens, "documents": documents})[0]
        alone = network.forward({"tokens": tokens[:, 7:]})[0]
    torch.testing.assert_close(packed[:, 7:], alone)
    assert network.head is None, "its logits are capped after the head"
