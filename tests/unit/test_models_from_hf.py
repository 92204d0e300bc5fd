import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.core import UserError
from trimaran.models import PRESETS, Block, ExpertSpec, spec_from_hf, spec_to_hf

LLAMA_31_8B: dict[str, Any] = {  # as Meta published it, in the form of transformers 4
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


def named(name: str, config: dict[str, Any]) -> Any:
    return replace(spec_from_hf(config, where="config.json"), name=name)


def test_a_published_config_equals_the_preset() -> None:
    assert named("llama-3.1-8b", LLAMA_31_8B) == PRESETS["llama-3.1-8b"]


def test_the_rotary_settings_of_transformers_5_are_read_too() -> None:
    config = {key: value for key, value in LLAMA_31_8B.items() if not key.startswith("rope_")}
    config["rope_parameters"] = LLAMA_31_8B["rope_scaling"] | {"rope_theta": 500000.0}
    assert named("llama-3.1-8b", config) == PRESETS["llama-3.1-8b"]


def test_fields_that_old_configs_omit_get_defaults() -> None:
    left_out = {"num_key_value_heads", "rope_scaling", "rope_theta", "tie_word_embeddings"}
    spec = named("old", {key: value for key, value in LLAMA_31_8B.items() if key not in left_out})
    assert (spec.kv_heads, spec.head_dim, spec.block.rope.theta, spec.tied) == (32, 128, 10_000.0, False)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_a_round_trip_through_a_hugging_face_config(name: str) -> None:
    assert named(name, spec_to_hf(PRESETS[name])) == PRESETS[name]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": 4096.5}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 10**30, "head_dim": 128}, "hidden_size"),
        ({"num_hidden_layers": -32}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": 33}, "num_attention_heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"vocab_size": [1]}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_a_missing_or_absurd_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match="M007") as caught:
        spec_from_hf(LLAMA_31_8B | change, where="config.json")
    assert caught.value.what.startswith(field)
    assert "config.json" in caught.value.where


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rotary positions"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_unsupported_features_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match="M006") as caught:
        spec_from_hf(LLAMA_31_8B | change, where="config.json")
    assert named in caught.value.what
    assert "family=hf" in caught.value.fix


JUNK = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)
CONFIGS = [LLAMA_31_8B, *(spec_to_hf(PRESETS[name]) for name in ("tiny-moe", "qwen3-30b-a3b", "qwen2.5-0.5b"))]


ANY = JUNK | st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "factor"]), JUNK)
CHANGED = [
    st.dictionaries(st.sampled_from([*config, "head_dim", "layer_types", "rope_parameters"]), ANY).map(config.__or__)
    for config in CONFIGS
]


@settings(max_examples=200, deadline=None, database=None)
@given(st.one_of(CHANGED))
def test_any_config_gives_a_spec_or_a_user_error(config: dict[str, Any]) -> None:
    with contextlib.suppress(UserError):
        assert spec_from_hf(config, where="config.json").num_parameters > 0


@pytest.mark.parametrize(
    "block",
    [
        Block(qkv_bias=True, qk_norm=True),
        Block(experts=ExpertSpec(num_experts=4, top_k=1, ffn=16)),
        Block(qk_norm=True, experts=ExpertSpec(num_experts=4, top_k=1, ffn=16, shared_ffn=16)),
    ],
)
def test_feature_combinations_that_no_architecture_has_are_refused(block: Block) -> None:
    with pytest.raises(UserError, match="M010"):
        spec_to_hf(replace(PRESETS["tiny"], block=block))
