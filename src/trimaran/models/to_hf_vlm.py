"""Converts a VlmSpec to a config.json: of the Hugging Face architecture with exactly its features, or our own."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from trimaran.models.config_fields import Fields
from trimaran.models.from_hf import spec_to_hf
from trimaran.models.from_hf_internvl import CHAT, OWN_LAYOUT, chat_layout
from trimaran.models.from_hf_vlm import ACTIVATIONS, OWN
from trimaran.models.spec import ModelSpec
from trimaran.models.to_hf_internvl import chat_config, fits_transformers, internvl_config, is_internvl
from trimaran.models.vlm_spec import VisionBlock, VisionEnds, VlmSpec, interleaved_sections

Form = Literal[
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "llava",
    "internvl",
    "internvl_chat",
    "internvl_internlm2",
    "trimaran_vlm",
]
ARCHITECTURES: Mapping[Form, str] = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "internvl_chat": "InternVLChatModel",
    "internvl_internlm2": "InternVLChatModel",
    OWN: "TrimaranVlm",
}
CHAT_FORMS: tuple[Form, ...] = ("internvl_chat", "internvl_internlm2")
_ON_DISK = {ours: theirs for theirs, ours in ACTIVATIONS.items()}


def vlm_to_disk(spec: VlmSpec) -> dict[str, Any]:
    """Return the config.json of `spec`. If no Hugging Face architecture fits, it is in our own format."""
    form = disk_form(spec)
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[form]], "model_type": form}
    if form == OWN:
        return config | {"shape": {field: value for field, value in asdict(spec).items() if field != "name"}}
    if form in CHAT_FORMS:
        return config | {"model_type": CHAT} | chat_config(spec)
    writers = {"llava": _llava, "qwen3_vl": _qwen_3, "qwen3_vl_moe": _qwen_3, OWN_LAYOUT: internvl_config}
    return config | writers.get(form, _qwen)(spec)


def disk_form(spec: VlmSpec) -> Form:
    """Return the architecture that has exactly the features of `spec`."""
    if _is_qwen(spec):
        block = spec.vision.block
        if (
            not block.gated
            and not block.rms_norm
            and not spec.vision.window
            and not spec.vision.ends.positions_per_second
            and spec.vision.ffn % spec.vision.hidden == 0
        ):
            return "qwen2_vl"
        if block.gated and block.rms_norm and spec.vision.window:
            return "qwen2_5_vl"
    if _is_qwen_3(spec):
        return "qwen3_vl_moe" if spec.language.block.experts else "qwen3_vl"
    if is_internvl(spec) and (spec.layout or fits_transformers(spec)):
        return spec.layout or OWN_LAYOUT
    return "llava" if _is_llava(spec) else OWN


def form_of_config(config: Mapping[str, Any]) -> Form:
    """Return the format of the weights beside this config.json."""
    if config["model_type"] != CHAT:
        return config["model_type"]
    return chat_layout(Fields(config, "config.json"))


def _is_qwen(spec: VlmSpec) -> bool:
    vision, language, block = spec.vision, spec.language, spec.language.block
    plain = VisionBlock(gated=vision.block.gated, rms_norm=vision.block.rms_norm, activation=vision.block.activation)
    ends = VisionEnds(mean=vision.ends.mean, std=vision.ends.std, positions_per_second=vision.ends.positions_per_second)
    return (
        (vision.variant, vision.block, vision.ends) == ("native", plain, ends)
        and (spec.projector.kind, spec.projector.normed) == ("mlp", True)
        and spec.projector_middle == spec.feature_width
        and len(spec.sections) == 3
        and (len(spec.before), len(spec.after)) == (1, 1)
        and (block.qkv_bias, block.qk_norm, block.experts, block.rope.factor) == (True, False, None, 1)
        and language.heads * language.head_dim == language.hidden
    )


def _is_qwen_3(spec: VlmSpec) -> bool:
    vision, block, merged = spec.vision, spec.language.block, spec.projector_middle == spec.feature_width
    ends = VisionEnds(stem_bias=True, table=vision.ends.table, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    return (
        (vision.variant, vision.block, vision.ends) == ("native", VisionBlock(activation=vision.block.activation), ends)
        and bool(vision.ends.table and spec.projector.normed and merged)
        and (spec.projector.kind, vision.window) == ("mlp", 0)
        and len(spec.sections) > 3
        and interleaved_sections(axis_pairs(spec.sections), spec.language.head_dim // 2) == spec.sections
        and (len(spec.before), len(spec.after)) == (1, 1)
        and (block.qkv_bias, block.qk_norm, block.rope.factor) == (False, True, 1)
        and (block.experts is None or _has_experts_of_qwen_3(spec.language))
    )


def _has_experts_of_qwen_3(language: ModelSpec) -> bool:
    """Return whether the experts are those of Qwen3-MoE, as the router of Qwen3-VL weights them."""
    experts = language.block.experts
    return experts is not None and experts.normalize_top_k and spec_to_hf(language)["model_type"] == "qwen3_moe"


def axis_pairs(sections: tuple[int, ...]) -> tuple[int, int, int]:
    """Return how many pairs of features follow time, row and column."""
    time, row, column = (sum(sections[axis::3]) for axis in range(3))
    return time, row, column


def _qwen_3(spec: VlmSpec) -> dict[str, Any]:
    vision, text = spec.vision, spec_to_hf(spec.language)
    del text["architectures"]
    sections = list(axis_pairs(spec.sections))
    kind = disk_form(spec)
    text |= {"model_type": f"{kind}_text", "attention_bias": False}
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": sections, "mrope_interleaved": True}
    vision_config = {
        "model_type": kind,
        "depth": vision.layers,
        "hidden_size": vision.hidden,
        "num_heads": vision.heads,
        "intermediate_size": vision.ffn,
        "out_hidden_size": spec.hidden,
        "hidden_act": _ON_DISK[vision.block.activation],
        "in_channels": 3,
        "patch_size": vision.patch,
        "spatial_merge_size": spec.projector.merge,
        "temporal_patch_size": vision.frames,
        "num_position_embeddings": vision.ends.table**2,
        "deepstack_visual_indexes": list(spec.projector.deepstack),
    }
    return {"text_config": text, "vision_config": vision_config, **_qwen_tokens(spec)}


def _qwen_tokens(spec: VlmSpec) -> dict[str, Any]:
    taken = {spec.image_token, *spec.before, *spec.after}
    return {
        "image_token_id": spec.image_token,
        "vision_start_token_id": spec.before[0],
        "vision_end_token_id": spec.after[0],
        "video_token_id": next(each for each in range(spec.image_token + 1, spec.vocab + 4) if each not in taken),
        "tie_word_embeddings": spec.tied,
    }


def _is_llava(spec: VlmSpec) -> bool:
    vision = spec.vision
    plain = VisionBlock(activation=vision.block.activation, norm_eps=vision.block.norm_eps)
    ends = VisionEnds(
        class_token=True, first_norm=True, table=vision.ends.table, mean=vision.ends.mean, std=vision.ends.std
    )
    return (
        (vision.variant, vision.block, vision.ends, vision.frames) == ("tiled", plain, ends, 1)
        and (spec.projector.kind, spec.projector.normed, spec.projector.merge) == ("mlp", False, 1)
        and spec.projector_middle == spec.hidden
        and spec.max_tiles == 1
        and vision.table_side == vision.tile_side
        and not (spec.sections or spec.before or spec.after)
    )


def _qwen(spec: VlmSpec) -> dict[str, Any]:
    vision, windowed = spec.vision, bool(spec.vision.window)
    text = spec_to_hf(spec.language)
    del text["architectures"], text["head_dim"]
    text["model_type"] = "qwen2_5_vl_text" if windowed else "qwen2_vl_text"
    text["rope_scaling"] = {"type": "mrope", "rope_type": "default", "mrope_section": list(spec.sections)}
    vision_config: dict[str, Any] = {
        "depth": vision.layers,
        "num_heads": vision.heads,
        "hidden_act": _ON_DISK[vision.block.activation],
        "in_channels": 3,
        "patch_size": vision.patch,
        "spatial_merge_size": spec.projector.merge,
        "temporal_patch_size": vision.frames,
    }
    if windowed:
        vision_config |= {
            "model_type": "qwen2_5_vl_vision",
            "hidden_size": vision.hidden,
            "out_hidden_size": spec.hidden,
        }
        vision_config |= {"intermediate_size": vision.ffn, "window_size": vision.window}
        vision_config |= {"fullatt_block_indexes": list(vision.full_layers)}
        if vision.ends.positions_per_second:
            vision_config["tokens_per_second"] = vision.ends.positions_per_second
    else:
        vision_config |= {"model_type": "qwen2_vl_vision", "embed_dim": vision.hidden, "hidden_size": spec.hidden}
        vision_config |= {"mlp_ratio": vision.ffn // vision.hidden}
    return {"text_config": text, "vision_config": vision_config, **_qwen_tokens(spec)}


def _llava(spec: VlmSpec) -> dict[str, Any]:
    vision = spec.vision
    return {
        "text_config": spec_to_hf(spec.language),
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": vision.hidden,
            "intermediate_size": vision.ffn,
            "num_hidden_layers": vision.layers,
            "num_attention_heads": vision.heads,
            "hidden_act": _ON_DISK[vision.block.activation],
            "layer_norm_eps": vision.block.norm_eps,
            "image_size": vision.tile,
            "patch_size": vision.patch,
        },
        "image_token_index": spec.image_token,
        "image_seq_length": vision.tile_side**2,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,  # the layers after the tapped one do not exist
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": spec.tied,
    }
