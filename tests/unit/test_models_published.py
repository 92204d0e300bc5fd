"""Published models: the relevant fields of their config.json, and their published number of parameters."""

from typing import Any

import pytest

from trimaran.models import PRESETS, Outline, OutlineLayer, outline_from_hf, outline_of


def shape(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab,
    }  # fmt: skip


def vision_shape(hidden: int, layers: int, heads: int, ffn: int, image: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": ffn,
        "image_size": image, "patch_size": 14,
    }  # fmt: skip


QWEN_7B = shape(3584, 28, 28, 4, 18944, 152064)
QWEN_VISION = {"depth": 32, "num_heads": 16, "in_chans": 3, "patch_size": 14, "temporal_patch_size": 2}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK_V3 = shape(7168, 61, 128, 128, 18432, 129280) | LATENT | {
    "model_type": "deepseek_v3", "q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1,
}  # fmt: skip
DEEPSEEK_V2_LITE = shape(2048, 27, 16, 16, 10944, 102400) | LATENT | {
    "model_type": "deepseek_v2", "q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1,
}  # fmt: skip
QWEN_MOE = shape(2048, 24, 16, 16, 5632, 151936) | {
    "model_type": "qwen2_moe", "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}  # fmt: skip
MIXTRAL = shape(4096, 32, 32, 8, 14336, 32000) | {"num_local_experts": 8, "num_experts_per_tok": 2}
GPT_OSS = shape(2880, 24, 64, 8, 2880, 201088) | {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4}
GPT2_XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257, "n_positions": 1024}
GPT_J = {"n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400}
FALCON = {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024}
BLOOM = {"hidden_size": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880}
MPT = {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50432}
OPT = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "ffn_dim": 16384, "vocab_size": 50272}
VIT_BASE = vision_shape(768, 12, 12, 3072, 224) | {
    "patch_size": 16,
    "id2label": {str(number): "" for number in range(1000)},
}
LLAVA = {  # other fields of the language model have the defaults of their class
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
    "vision_config": vision_shape(1024, 24, 16, 4096, 336) | {"model_type": "clip_vision_model"},
}
QWEN_2_VL = QWEN_7B | {"vision_config": QWEN_VISION | {"embed_dim": 1280, "mlp_ratio": 4, "hidden_size": 3584}}
QWEN_25_VL = QWEN_7B | {
    "vision_config": QWEN_VISION | {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
}
GEMMA_3 = {
    "text_config": shape(5376, 62, 32, 16, 21504, 262208) | {"model_type": "gemma3_text", "head_dim": 128},
    "vision_config": vision_shape(1152, 27, 16, 4304, 896) | {"vision_use_head": False},
}
INTERN_CHAT = {
    "llm_config": shape(6144, 48, 48, 8, 16384, 92553) | {"model_type": "internlm2"},
    "vision_config": vision_shape(3200, 45, 25, 12800, 448) | {"model_type": "intern_vit_6b", "qkv_bias": False},
}


@pytest.mark.parametrize(
    ("kind", "config", "parameters"),
    [
        pytest.param("llama", shape(4096, 32, 32, 8, 14336, 128256), 8_030_261_248, id="llama-3-8b"),
        pytest.param("mistral", shape(4096, 32, 32, 8, 14336, 32000), 7_241_732_096, id="mistral-7b"),
        pytest.param("qwen2", QWEN_7B, 7_615_616_512, id="qwen2.5-7b"),
        pytest.param("gemma2", shape(3584, 42, 16, 8, 14336, 256000), 9_241_705_984, id="gemma-2-9b"),
        pytest.param("phi3", shape(3072, 32, 32, 32, 8192, 32064), 3_821_079_552, id="phi-3-mini"),
        pytest.param("mixtral", MIXTRAL, 46_702_792_704, id="mixtral-8x7b"),
        pytest.param("qwen2_moe", QWEN_MOE, 14_315_784_192, id="qwen1.5-moe"),
        pytest.param("deepseek_v2", DEEPSEEK_V2_LITE, 15_706_484_224, id="deepseek-v2-lite"),
        pytest.param("deepseek_v3", DEEPSEEK_V3, 671_026_404_352, id="deepseek-v3"),
        pytest.param("gpt_oss", GPT_OSS, 20_914_757_184, id="gpt-oss-20b"),
        pytest.param("gpt2", GPT2_XL, 1_557_611_200, id="gpt2-xl"),
        pytest.param("gpt_neox", shape(6144, 44, 64, 64, 24576, 50432), 20_554_567_680, id="gpt-neox-20b"),
        pytest.param("gptj", GPT_J, 6_050_882_784, id="gpt-j-6b"),
        pytest.param("opt", OPT, 6_658_473_984, id="opt-6.7b"),
        pytest.param("falcon", FALCON, 6_921_720_704, id="falcon-7b"),
        pytest.param("bloom", BLOOM, 7_069_016_064, id="bloom-7b1"),
        pytest.param("mpt", MPT, 6_649_286_656, id="mpt-7b"),
        pytest.param("vit", VIT_BASE | {"architectures": ["ViTForImageClassification"]}, 86_567_656, id="vit-base"),
        pytest.param("llava", LLAVA, 7_063_427_072, id="llava-1.5-7b"),
        pytest.param("qwen2_vl", QWEN_2_VL, 8_291_375_616, id="qwen2-vl-7b"),
        pytest.param("qwen2_5_vl", QWEN_25_VL, 8_292_166_656, id="qwen2.5-vl-7b"),
        pytest.param("gemma3", GEMMA_3, 27_432_406_640, id="gemma-3-27b"),
        pytest.param("internvl_chat", INTERN_CHAT, 25_514_186_112, id="internvl2-26b"),
    ],
)
def test_published_models_have_their_published_size(kind: str, config: dict[str, Any], parameters: int) -> None:
    assert outlined({"model_type": kind, **config}).num_parameters == parameters


def outlined(config: dict[str, Any]) -> Outline:
    return outline_from_hf(config, where="config.json", name="it")


def test_a_token_of_deepseek_v3_uses_37_billion_weights() -> None:
    main = outlined(DEEPSEEK_V3).main
    active = sum(block.active_weights * count for block, count in main.runs if isinstance(block, OutlineLayer))
    assert (active + main.head_parameters) / 1e9 == pytest.approx(36.6, abs=0.1)  # 37B with the embedding's 0.9B
    assert [count for _, count in main.runs] == [3, 58]


def test_a_window_makes_attention_cheaper_by_the_keys_outside_it() -> None:
    (full, _) = outline_of(PRESETS["mistral-7b"]).main.runs[0]
    (windowed, _) = outlined({"model_type": "mistral", **shape(4096, 32, 32, 8, 14336, 32000)}).main.runs[0]
    assert isinstance(full, OutlineLayer)
    assert isinstance(windowed, OutlineLayer)
    assert full.mean_attended_keys(8192) == windowed.mean_attended_keys(4096) * 2 == 4096
    # The first 4,096 queries attend to half a window on average, the others to all of it.
    assert windowed.mean_attended_keys(16384) == (4096 * 2048 + 12288 * 4096) / 16384
