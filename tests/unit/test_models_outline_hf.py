"""Outlines of Hugging Face configs: they have the parameters that transformers builds, and the right positions."""

import json
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from trimaran.core import UserError
from trimaran.models import (
    FAMILY_TRAITS,
    PRESETS,
    USUAL,
    VISION_OUTLINES,
    ImageLimits,
    Outline,
    OutlineLayer,
    outline_from_hf,
    outline_of,
    spec_to_hf,
)

LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 64,
}  # fmt: skip
PLAIN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    **PLAIN, "num_hidden_layers": 4, "intermediate_size": 48, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}  # fmt: skip
VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
DINO = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 7}
CLIP = {"model_type": "clip_vision_model", **VIT}
SIGLIP = {"model_type": "siglip_vision_model", **VIT}
HEADLESS = SIGLIP | {"vision_use_head": False}
INTERN = VIT | {"image_size": [28, 28], "patch_size": [7, 7]}
QWEN_VISION = {"depth": 10, "num_heads": 4, "patch_size": 7}
QWEN_2 = {"model_type": "qwen2", **LLAMA}
WIDE_HEADS = LLAMA | {"head_dim": 16}
DEEPSTACK_VISION = QWEN_VISION | {
    "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 32, "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 16,
}  # fmt: skip

Shapes = dict[str, list[dict[str, Any]]]
CAUSAL: Shapes = {
    "llama": [LLAMA, LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}],
    "mistral": [LLAMA],
    "qwen2": [LLAMA],
    "qwen3": [WIDE_HEADS],
    "gemma": [WIDE_HEADS],
    "gemma2": [WIDE_HEADS],
    "gemma3_text": [WIDE_HEADS],
    "phi": [LLAMA],
    "phi3": [LLAMA | {"pad_token_id": 0}],
    "mixtral": [LLAMA | {"num_local_experts": 4}],
    "qwen2_moe": [LLAMA | MIXED | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1]}],
    "qwen3_moe": [WIDE_HEADS | MIXED | {"decoder_sparse_step": 2}],
    "deepseek_v2": [DEEPSEEK, DEEPSEEK | {"q_lora_rank": None}],
    "deepseek_v3": [DEEPSEEK, DEEPSEEK | {"attention_bias": True}],
    "gpt_oss": [WIDE_HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}],
    "gpt2": [GPT, GPT | {"n_inner": 48}],
    "gpt_neox": [PLAIN | {"intermediate_size": 48}],
    "gptj": [GPT | {"rotary_dim": 4}],
    "opt": [PLAIN | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 16}],
    "falcon": [
        PLAIN,
        PLAIN | {"new_decoder_architecture": True, "num_kv_heads": 2},
        PLAIN | {"parallel_attn": False, "multi_query": False, "bias": True},
    ],
    "bloom": [{"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}],
    "mpt": [{"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64}],
    "starcoder2": [LLAMA],
    "cohere2": [LLAMA],
    "olmo2": [LLAMA],
    "granite": [LLAMA],  # in no table: read by the names that most families use
}
VLMS: Shapes = {
    "llava": [
        {"vision_config": CLIP, "text_config": {"model_type": "llama", **LLAMA}},
        {"vision_config": SIGLIP, "text_config": QWEN_2},
    ],
    "llava_next": [{"vision_config": CLIP, "text_config": {"model_type": "llama", **LLAMA}}],
    "llava_onevision": [{"vision_config": HEADLESS, "text_config": QWEN_2}],
    "internvl": [
        {"vision_config": INTERN | {"use_qk_norm": True, "norm_type": "rms_norm"}, "text_config": QWEN_2},
        {
            "vision_config": INTERN | {"attention_bias": True, "use_mean_pooling": False, "use_mask_token": True},
            "text_config": QWEN_2,
            "tie_word_embeddings": False,
        },
    ],
    "qwen2_vl": [
        {"vision_config": QWEN_VISION | {"embed_dim": 32, "mlp_ratio": 4, "hidden_size": 32}, "text_config": LLAMA}
    ],
    "qwen2_5_vl": [
        {
            "vision_config": QWEN_VISION | {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 32},
            "text_config": LLAMA,
        }
    ],
    "qwen3_vl": [{"vision_config": DEEPSTACK_VISION, "text_config": WIDE_HEADS}],
    "qwen3_vl_moe": [{"vision_config": DEEPSTACK_VISION, "text_config": WIDE_HEADS | MIXED}],
    "gemma3": [{"vision_config": HEADLESS, "text_config": WIDE_HEADS, "mm_tokens_per_image": 4}],
    "paligemma": [
        {"vision_config": HEADLESS, "text_config": {"model_type": "gemma", **WIDE_HEADS}, "projection_dim": 32}
    ],
    "mistral3": [
        {
            "vision_config": {"model_type": "pixtral", **VIT},
            "text_config": {"model_type": "mistral", **WIDE_HEADS},
        }
    ],
}
VISION: dict[str, Shapes] = {
    "ForImageClassification": {"vit": [VIT], "dinov2": [DINO]},
    "ForObjectDetection": {
        "yolos": [VIT | {"image_size": [28, 35]}, VIT | {"image_size": [28, 28], "use_mid_position_embeddings": False}]
    },
    "": {
        "vit": [VIT],
        "dinov2": [DINO | {"use_swiglu_ffn": True}],
        "siglip_vision_model": [VIT],
        "clip_vision_model": [VIT],
    },
}
CASES = [
    pytest.param(task, kind, fields, id=f"{kind}-{number}{task.removeprefix('For')}")
    for task, kinds in {"ForCausalLM": CAUSAL, "ForImageTextToText": VLMS, **VISION}.items()
    for kind, shapes in kinds.items()
    for number, fields in enumerate(shapes)
]


def outlined(config: dict[str, Any], images: ImageLimits | None = None) -> Outline:
    return outline_from_hf(config, where="config.json", name="it", images=images or ImageLimits())


@pytest.mark.parametrize(("task", "kind", "fields"), CASES)
def test_an_outline_has_exactly_the_parameters_that_transformers_builds(
    task: str, kind: str, fields: dict[str, Any]
) -> None:
    with torch.device("meta"):
        module = getattr(transformers, f"AutoModel{task}").from_config(AutoConfig.for_model(kind, **fields))
    module.config.architectures = [type(module).__name__]
    wanted = sum(each.numel() for each in module.parameters())
    for written in (module.config.to_dict(), module.config.to_diff_dict()):  # in full, and as it is saved
        assert outlined(json.loads(json.dumps(written, default=str))).num_parameters == wanted


def test_omitted_fields_get_the_defaults_of_their_class() -> None:
    assumed = {kind: habit.usual for kind, habit in FAMILY_TRAITS.items()} | USUAL
    for kind, usual in assumed.items():
        if kind in ("internlm2", "intern_vit_6b"):  # not in transformers
            continue
        config = AutoConfig.for_model(kind)
        real = (config.vision_config if kind in VISION_OUTLINES else config).to_dict()
        wrong = {name: real[name] for name, value in usual.items() if name in real and real[name] not in (value, None)}
        assert not wrong, f"{kind}: {wrong}"


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b"])
def test_our_decoder_has_the_same_outline_from_its_spec_and_its_config(name: str) -> None:
    ours, theirs = outline_of(PRESETS[name]), outlined(spec_to_hf(PRESETS[name]))
    assert theirs.num_parameters == ours.num_parameters
    assert theirs.training_flops(4096) == ours.training_flops(4096)
    assert (theirs.layers, theirs.max_seq_len) == (ours.layers, ours.max_seq_len)


def windows(config: dict[str, Any]) -> list[int]:
    return [step.block.window for step in outlined(config).steps() if isinstance(step.block, OutlineLayer)]


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("gemma2", {"head_dim": 8, "sliding_window": 16}, [16, 0, 16, 0, 16, 0, 16]),
        ("gemma3_text", {"head_dim": 8, "sliding_window": 16}, [16, 16, 16, 16, 16, 0, 16]),
        ("mistral", {"sliding_window": 16}, [16] * 7),
        ("mistral", {"sliding_window": None}, [0] * 7),
        ("qwen2", {"sliding_window": 16}, [0] * 7),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 5}, [0] * 5 + [16] * 2),
        ("phi3", {"sliding_window": 16, "pad_token_id": 0}, [16] * 7),
    ],
)
def test_windows_are_in_the_layers_where_transformers_has_them(
    kind: str, fields: dict[str, Any], expected: list[int]
) -> None:
    config = AutoConfig.for_model(kind, **LLAMA | {"num_hidden_layers": 7} | fields).to_dict()
    assert windows(config) == expected
    # An older config.json lists no layers: the family's pattern fills them in.
    hints = ("layer_types", "_sliding_window_pattern", "sliding_window_pattern")
    assert windows({name: value for name, value in config.items() if name not in hints}) == expected


def test_an_image_of_a_fixed_size_model_is_one_segment_of_patches_and_a_class_token() -> None:
    vision, projector, language = outlined({"model_type": "llava", **VLMS["llava"][0]}, ImageLimits(count=3)).towers
    assert [tower.name for tower in (vision, projector, language)] == ["vision", "projector", "language"]
    assert (vision.positions, vision.segment) == (3 * 17, 17)  # 28 pixels are 4 x 4 patches of 7
    assert projector.positions == 3 * 16
    assert language.sample_positions(100) == (100, 100)


def test_internvl_splits_a_large_image_into_tiles_and_adds_a_thumbnail() -> None:
    config = {"model_type": "internvl", **VLMS["internvl"][0]}
    assert outlined(config).towers[0].positions == 17
    vision, projector, _ = outlined(config, ImageLimits(size=84)).towers  # three tiles of 28 a side
    assert (vision.positions, vision.segment, projector.positions) == (10 * 17, 17, 10 * 4)


def test_llava_next_takes_the_smallest_grid_that_holds_the_image() -> None:
    config = {"model_type": "llava_next", **VLMS["llava_next"][0]}
    config["image_grid_pinpoints"] = [[28, 56], [56, 28], [56, 56], [84, 28]]
    assert outlined(config).towers[0].positions == 3 * 17
    assert outlined(config, ImageLimits(size=56)).towers[0].positions == 5 * 17


def test_qwen_takes_an_image_at_its_own_size_and_mostly_in_windows() -> None:
    config: dict[str, Any] = {"model_type": "qwen2_5_vl", **VLMS["qwen2_5_vl"][0]}
    config["vision_config"] = config["vision_config"] | {"window_size": 28, "fullatt_block_indexes": [1, 4]}
    vision, projector, _ = outlined(config, ImageLimits(count=2, size=100)).towers
    assert (vision.segment, vision.positions) == (196, 392)  # 100 pixels are rounded to 98: 14 x 14 patches of 7
    assert projector.positions == 98
    windows = [step.block.window for step in outlined(config).steps() if step.tower.name == "vision"]  # type: ignore[union-attr]
    assert windows == [16, 0, 16, 16, 0, 16, 16, 16, 16, 16]


def test_a_detector_has_box_tokens_in_addition_to_patches() -> None:
    tower = outlined({"model_type": "yolos", **VIT, "num_detection_tokens": 10}).main
    assert (tower.positions, tower.segment) == (27, 27)
    assert outlined({"model_type": "yolos", **VIT}, ImageLimits(size=56)).main.positions == 64 + 1 + 100


@pytest.mark.parametrize(
    ("config", "code", "text"),
    [
        ({}, "M011", "width (hidden_size | n_embd | d_model | dim), layers ("),
        ({"model_type": "new", "d_model": 8, "n_layer": 2, "n_head": 2}, "M011", "lacks vocabulary (vocab_size"),
        ({"model_type": "new", **PLAIN}, "M011", "feed-forward (intermediate_size | n_inner"),
        ({"model_type": "t5", **LLAMA, "is_encoder_decoder": True}, "M011", "an encoder and a decoder"),
        ({"model_type": "new", **LLAMA, "layer_types": ["linear_attention"] * 4}, "M011", "'linear_attention'"),
        ({"model_type": "clip", "vision_config": {}, "text_config": {}}, "M011", "two encoders"),
        ({"model_type": "new", "vision_config": {"depth": 2}, "text_config": QWEN_2}, "M011", "vision lacks width"),
        ({"model_type": "llama", **LLAMA, "num_attention_heads": 5}, "M007", "5 heads do not divide hidden_size 32"),
        ({"model_type": "llama", **LLAMA, "num_key_value_heads": 3}, "M007", "3 key-value heads do not divide 4"),
        ({"model_type": "mistral", **LLAMA, "hidden_size": -32}, "M007", "-32 is not between 1 and"),
        ({"model_type": "mistral", **LLAMA, "num_hidden_layers": 10**6}, "M007", "not between 1 and 4096"),
        ({"model_type": "mistral", **LLAMA, "vocab_size": "many"}, "M007", "'many' is not a whole number"),
        ({"model_type": "vit", **VIT, "num_attention_heads": 5}, "M007", "5 heads do not divide"),
        ({"model_type": "vit", **VIT, "patch_size": 0}, "M007", "patch_size: [0] is not a size in pixels"),
        ({"model_type": "vit", **VIT, "patch_size": 99}, "M007", "cannot be split into patches of 99"),
        ({"model_type": "llava", "vision_config": 3, "text_config": QWEN_2}, "M007", "3 is not a mapping"),
        ({"model_type": ["llama"]}, "M007", "is not a string"),
        ({"model_type": "opt", **PLAIN, "word_embed_proj_dim": 16}, "M011", "narrower than its layers"),
        ({"model_type": "deepseek_v3", **DEEPSEEK, "num_experts_per_tok": 5}, "M007", "5 is not between 1 and 4"),
    ],
)
def test_missing_and_invalid_fields_are_named(config: dict[str, Any], code: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        outlined(config)
    assert caught.value.code == code
    assert text in caught.value.what


@pytest.mark.parametrize("junk", [None, 0, -1, 1.5, True, "x", [], {}, [None], 10**400, float("nan")], ids=range(11))
def test_any_field_value_gives_an_outline_or_a_user_error(junk: Any) -> None:
    vlms = [(kind, shapes[0]) for kind, shapes in VLMS.items()]
    for kind, fields in [("deepseek_v3", DEEPSEEK), ("falcon", PLAIN), ("vit", VIT), *vlms]:
        config: dict[str, Any] = {"model_type": kind, **fields}
        for key in config:
            _try(config | {key: junk})
        for part in ("vision_config", "text_config"):
            for key in config.get(part, {}):
                _try(config | {part: config[part] | {key: junk}})


def _try(config: dict[str, Any]) -> None:
    try:
        assert outlined(config).num_parameters > 0
    except UserError as error:
        if error.code not in ("M007", "M011"):
            raise
