"""Converts a VlmSpec with InternVL's features to a config.json: OpenGVLab's own layout, or that of transformers."""

from typing import Any

from trimaran.models.from_hf import spec_to_hf
from trimaran.models.from_hf_internvl import QK_NORM_EPS, TOKEN_FIELDS
from trimaran.models.vlm_spec import IMAGENET_MEAN, IMAGENET_STD, VisionBlock, VisionEnds, VlmSpec


def is_internvl(spec: VlmSpec) -> bool:
    """Return whether InternVL has exactly the features of `spec`."""
    vision, block, language = spec.vision, spec.vision.block, spec.language
    plain = VisionBlock(
        rms_norm=block.rms_norm,
        norm_eps=block.norm_eps,
        qkv_bias=block.qkv_bias,
        qk_norm=block.qk_norm,
        scaled=True,
    )
    ends = VisionEnds(
        class_token=True,
        stem_bias=True,
        table=vision.ends.table,
        thumbnail=vision.ends.thumbnail,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
    return (
        (vision.variant, block, vision.ends, vision.frames) == ("tiled", plain, ends, 1)
        and (not block.qk_norm or block.rms_norm)
        and (spec.projector.kind, spec.projector.merge, spec.projector_middle) == ("pixel-shuffle", 2, spec.hidden)
        and (len(spec.before), len(spec.after)) == (1, 1)
        and vision.ends.thumbnail != "first"
        and not spec.sections
        and language.block.experts is None
        and (spec.layout != "internvl_internlm2" or language.heads * language.head_dim == language.hidden)
    )


def fits_transformers(spec: VlmSpec) -> bool:
    """Return whether transformers' InternVL, too, has the features of `spec`, which `is_internvl`."""
    vision = spec.vision
    return vision.table_side == vision.tile_side and (not vision.block.qk_norm or vision.block.norm_eps == QK_NORM_EPS)


def internvl_config(spec: VlmSpec) -> dict[str, Any]:
    """Return the fields of transformers' InternVL."""
    vision, block = spec.vision, spec.vision.block
    return {
        "text_config": spec_to_hf(spec.language),
        "vision_config": {
            "model_type": "internvl_vision",
            **_tower_fields(spec),
            "attention_bias": block.qkv_bias,
            "use_qk_norm": block.qk_norm,
            "image_size": [vision.tile, vision.tile],
            "patch_size": [vision.patch, vision.patch],
        },
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,  # the layers after the tapped one do not exist
        "vision_feature_select_strategy": "default",
        "image_seq_length": (vision.tile_side // 2) ** 2,
        "tie_word_embeddings": spec.tied,
        **_image_fields(spec),
    }


def chat_config(spec: VlmSpec) -> dict[str, Any]:
    """Return the fields of OpenGVLab's own layout, for the code that comes with its folders."""
    vision, block = spec.vision, spec.vision.block
    return {
        "llm_config": _internlm_2(spec) if spec.layout == "internvl_internlm2" else spec_to_hf(spec.language),
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "model_type": "intern_vit_6b",
            **_tower_fields(spec),
            "qkv_bias": block.qkv_bias,
            "qk_normalization": block.qk_norm,
            "image_size": vision.table_side * vision.patch,
            "patch_size": vision.patch,
        },
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "select_layer": -1,  # the layers after the tapped one do not exist
        "force_image_size": vision.tile,
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        **_image_fields(spec),
    }


def _tower_fields(spec: VlmSpec) -> dict[str, Any]:
    """Return the fields of the vision tower that both layouts name alike."""
    vision, block = spec.vision, spec.vision.block
    return {
        "hidden_size": vision.hidden,
        "intermediate_size": vision.ffn,
        "num_hidden_layers": vision.layers,
        "num_attention_heads": vision.heads,
        "hidden_act": "gelu",
        "layer_norm_eps": block.norm_eps,
        "norm_type": "rms_norm" if block.rms_norm else "layer_norm",
    }


def _internlm_2(spec: VlmSpec) -> dict[str, Any]:
    language = spec_to_hf(spec.language)
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act",
    )  # fmt: skip
    kept = {name: language[name] for name in names if name in language}
    kept |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    return kept | {"rope_theta": spec.language.block.rope.theta, "tie_word_embeddings": spec.tied}


def _image_fields(spec: VlmSpec) -> dict[str, Any]:
    """Return how images are cut and which tokens stand for them: published folders have the ids in the tokenizer."""
    image, start, end = TOKEN_FIELDS.values()
    return {
        "max_dynamic_patch": spec.max_tiles,
        "min_dynamic_patch": 1,
        "dynamic_image_size": True,
        "use_thumbnail": spec.vision.ends.thumbnail == "last",
        image: spec.image_token,
        start: spec.before[0],
        end: spec.after[0],
    }
