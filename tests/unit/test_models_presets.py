from dataclasses import replace
from typing import Any

import pytest

from trimaran.models import PRESETS, first_invalid_field, outline_of, spec_from_hf

PUBLISHED = {  # distinct weights; a tied head counts once
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "phi-4": 14_659_507_200,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "command-r-35b": 34_980_831_232,
    "command-r7b": 8_028_033_024,
    "glm-4-9b": 9_400_279_040,
}


def config(kind: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
    } | others


GEMMA = {"vocab_size": 256000, "max_position_embeddings": 8192, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}
GEMMA_2 = GEMMA | {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
}
GEMMA_3_1B = GEMMA | {
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
}
PHI_4 = {"vocab_size": 100352, "max_position_embeddings": 16384, "rope_theta": 250000, "rms_norm_eps": 1e-5}
OLMO_2 = {"vocab_size": 100352, "max_position_embeddings": 4096, "rope_theta": 500000, "rms_norm_eps": 1e-6}
COMMAND_R = {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "model_max_length": 131072,
    "rope_theta": 8000000.0,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
}
COMMAND_R7B = {
    "vocab_size": 256000,
    "max_position_embeddings": 132096,
    "rope_theta": 50000,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.25,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
GLM_4 = {
    "vocab_size": 151552,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
# Fields of config.json, compared with public copies: those of LitGPT, Megatron-Bridge and slime, logs of llama.cpp.
CONFIGS = {
    "gemma-2b": config("gemma", 2048, 18, 8, 1, 16384, **GEMMA, head_dim=256),
    "gemma-7b": config("gemma", 3072, 28, 16, 16, 24576, **GEMMA, head_dim=256),
    "gemma-2-2b": config("gemma2", 2304, 26, 8, 4, 9216, **GEMMA_2),
    "gemma-2-9b": config("gemma2", 3584, 42, 16, 8, 14336, **GEMMA_2),
    "gemma-2-27b": config("gemma2", 4608, 46, 32, 16, 36864, **GEMMA_2 | {"head_dim": 128,
                                                                          "query_pre_attn_scalar": 144}),
    "gemma-3-1b": config("gemma3_text", 1152, 26, 4, 1, 6912, **GEMMA_3_1B),
    "phi-4": config("phi3", 5120, 40, 40, 10, 17920, **PHI_4),
    "olmo-2-7b": config("olmo2", 4096, 32, 32, 32, 11008, **OLMO_2),
    "olmo-2-13b": config("olmo2", 5120, 40, 40, 40, 13824, **OLMO_2),
    "command-r-35b": config("cohere", 8192, 40, 64, 64, 22528, **COMMAND_R),
    "command-r7b": config("cohere2", 4096, 32, 32, 8, 14336, **COMMAND_R7B),
    "glm-4-9b": config("glm4", 4096, 40, 32, 2, 13696, **GLM_4),
}  # fmt: skip


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(name: str, published: int) -> None:
    assert PRESETS[name].num_parameters == published
    assert outline_of(PRESETS[name]).num_parameters == published


@pytest.mark.parametrize("name", CONFIGS)
def test_presets_are_what_their_published_configuration_says(name: str) -> None:
    published, preset = spec_from_hf(CONFIGS[name], where="config.json"), PRESETS[name]
    layers = range(preset.layers)
    assert [published.layer(each) for each in layers] == [preset.layer(each) for each in layers]
    attention = replace(published.block.attention, windows=(), rope_layers=())
    block = replace(published.block, attention=attention)
    assert replace(published, name=name, family=preset.family, block=block) == replace(
        preset, block=replace(preset.block, attention=replace(preset.block.attention, windows=(), rope_layers=()))
    )


def test_every_preset_is_valid_and_only_the_toys_are_unpublished() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"tiny", "tiny-moe"}
    for name, spec in PRESETS.items():
        assert spec.name == name
        assert first_invalid_field(spec) is None


def test_a_token_of_qwen3_30b_a3b_uses_three_billion_weights() -> None:
    spec = PRESETS["qwen3-30b-a3b"]
    experts = spec.block.experts
    assert experts is not None
    idle = spec.layers * 3 * spec.hidden * experts.ffn * (experts.num_experts - experts.top_k)
    assert spec.num_parameters - idle == 3_353_032_704
