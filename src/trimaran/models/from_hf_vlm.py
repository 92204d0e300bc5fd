"""Converts the config.json of a vision-language model to a VlmSpec."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from trimaran.core import UserError
from trimaran.models.config_fields import Fields, bad_field, show
from trimaran.models.from_hf import spec_from_hf
from trimaran.models.from_hf_internvl import CHAT, OWN_LAYOUT, internvl_spec
from trimaran.models.hf_vision import USUAL
from trimaran.models.shape_fields import changed
from trimaran.models.spec import ModelSpec
from trimaran.models.validate_vlm import first_invalid_vlm_field
from trimaran.models.vlm_spec import (
    ProjectorSpec,
    VisionBlock,
    VisionEnds,
    VisionSpec,
    VlmSpec,
    interleaved_sections,
)

Activation = Literal["gelu", "gelu-tanh", "quick-gelu", "silu"]
OWN, ONEVISION = "trimaran_vlm", "llava_onevision"
FOREIGN = ("qwen2_vl", "qwen2_5_vl", "llava", ONEVISION, OWN_LAYOUT)  # transformers has classes for these
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "quick_gelu": "quick-gelu",
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu-tanh",
}
# Defaults of transformers' configuration classes.
_LLAMA = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000, "rms_norm_eps": 1e-6,
}  # fmt: skip
_ONEVISION_SIDE = 6  # tiles per side of the largest grid
_ONEVISION_TOWER = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16,
                    "image_size": 384, "patch_size": 14}  # fmt: skip
_QWEN_TOKENS = {"image_token_id": 151655, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
_QWEN_SECTIONS = (16, 24, 24)
_QWEN_THETA = 1_000_000.0
_QWEN_3_SECTIONS, _QWEN_3_THETA = (24, 20, 20), 500_000.0


def vlm_from_disk(config: Mapping[str, Any], *, where: str) -> VlmSpec:
    """Return the shape that `config` describes. `where` names the configuration in errors."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        raise _cannot(f"model_type is {show(kind)}; it supports {', '.join(READERS)}", where)
    spec = READERS[kind](Fields(config, where))
    if problem := first_invalid_vlm_field(spec):
        raise bad_field(problem[0], problem[1], where)
    return spec


def _own(fields: Fields) -> VlmSpec:
    try:
        return changed(VlmSpec, None, {"name": OWN} | dict(fields.below("shape").config), "shape")
    except UserError as error:
        raise bad_field(error.where, error.what, fields.where) from None


def _qwen(fields: Fields) -> VlmSpec:
    kind = fields.word("model_type", default="")
    below = fields.below("vision_config").assuming(USUAL[kind])
    text = fields.below("text_config") if fields.has("text_config") else fields
    vision = _qwen_2_vision(below) if kind == "qwen2_vl" else _qwen_25_vision(below)
    language, sections = _qwen_language(fields, text)
    width = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
    if (out := below.size(width, default=language.hidden)) != language.hidden:
        raise bad_field(f"vision_config.{width}", f"{out} is not the language's {language.hidden}", fields.where)
    merge = below.size("spatial_merge_size", default=2)
    image, start, end = (fields.integer(name, default=usual) for name, usual in _QWEN_TOKENS.items())
    return VlmSpec(
        name=kind,
        vision=vision,
        projector=ProjectorSpec(merge=merge, hidden=vision.hidden * merge * merge),
        language=language,
        image_token=image,
        before=(start,),
        after=(end,),
        sections=sections,
    )


def _qwen_language(fields: Fields, text: Fields) -> tuple[ModelSpec, tuple[int, ...]]:
    """Return the decoder, a Qwen2 except for its positions, and its M-RoPE sections (time, row, column)."""
    rope = text.config.get("rope_parameters") or text.config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise bad_field("rope_scaling", f"{show(rope)} is not a mapping", text.where)
    sections = Fields(rope, text.where).numbers("mrope_section") or _QWEN_SECTIONS
    kinds = {rope.get(name) for name in ("type", "rope_type")} - {None, "mrope", "default"}
    if kinds:
        raise _cannot(f"rope_type is {show(kinds.pop())}", text.where)
    theta = rope.get("rope_theta") or text.config.get("rope_theta") or _QWEN_THETA
    plain = {"model_type": "qwen2", "rope_parameters": None, "rope_scaling": None, "rope_theta": theta}
    plain |= {"tie_word_embeddings": _tied(fields, text)}
    return spec_from_hf({**text.config, **plain}, where=text.where), sections


def _qwen_3(fields: Fields) -> VlmSpec:
    """Return the shape of Qwen3-VL: learned and rotary positions, features of several layers, interleaved M-RoPE."""
    kind = fields.word("model_type", default="")
    below = fields.below("vision_config").assuming(USUAL[kind])
    text = fields.below("text_config")
    rope = text.config.get("rope_parameters") or text.config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise bad_field("rope_parameters", f"{show(rope)} is not a mapping", text.where)
    kinds = {rope.get(name) for name in ("type", "rope_type")} - {None, "mrope", "default"}
    if kinds:
        raise _cannot(f"rope_type is {show(kinds.pop())}", text.where)
    theta = rope.get("rope_theta") or text.config.get("rope_theta") or _QWEN_3_THETA
    plain = {"model_type": "qwen3", "rope_parameters": None, "rope_scaling": None, "rope_theta": theta}
    if kind == "qwen3_vl_moe":  # its router has no option not to normalise
        plain |= {"model_type": "qwen3_moe", "norm_topk_prob": True}
    language = spec_from_hf({**text.config, **plain, "tie_word_embeddings": _tied(fields, text)}, where=text.where)
    if (out := below.size("out_hidden_size", default=language.hidden)) != language.hidden:
        raise bad_field("vision_config.out_hidden_size", f"{out} is not the language's {language.hidden}", fields.where)
    vision, merge = _qwen_3_vision(below), below.size("spatial_merge_size", default=2)
    image, start, end = (fields.integer(name, default=usual) for name, usual in _QWEN_TOKENS.items())
    parts = Fields(rope, text.where).numbers("mrope_section") or _QWEN_3_SECTIONS
    if len(parts) != 3:
        raise bad_field("mrope_section", f"{list(parts)} are not those of time, row and column", text.where)
    return VlmSpec(
        name=kind,
        vision=vision,
        projector=ProjectorSpec(
            merge=merge, hidden=vision.hidden * merge * merge, deepstack=below.numbers("deepstack_visual_indexes")
        ),
        language=language,
        image_token=image,
        before=(start,),
        after=(end,),
        sections=interleaved_sections(parts, language.head_dim // 2),
        min_pixels=256 * 256,
        max_pixels=4096 * 4096,
    )


def _qwen_3_vision(below: Fields) -> VisionSpec:
    places = below.size("num_position_embeddings")
    if (side := math.isqrt(places)) ** 2 != places:
        raise bad_field("num_position_embeddings", f"{places} positions are not a square", below.where)
    return VisionSpec(
        layers=below.size("depth"),
        hidden=below.size("hidden_size"),
        heads=below.size("num_heads", "num_attention_heads"),
        ffn=below.size("intermediate_size"),
        patch=_patch(below),
        frames=below.size("temporal_patch_size"),
        block=VisionBlock(activation=_activation(below, "gelu_pytorch_tanh")),
        ends=VisionEnds(stem_bias=True, table=side, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
    )


def _qwen_2_vision(below: Fields) -> VisionSpec:
    hidden = below.size("embed_dim")
    return VisionSpec(
        layers=below.size("depth"),
        hidden=hidden,
        heads=below.size("num_heads", "num_attention_heads"),
        ffn=int(hidden * below.number("mlp_ratio")),
        patch=_patch(below),
        frames=below.size("temporal_patch_size"),
        block=VisionBlock(activation=_activation(below, "quick_gelu")),
    )


def _qwen_25_vision(below: Fields) -> VisionSpec:
    layers = below.size("depth")
    return VisionSpec(
        layers=layers,
        hidden=below.size("hidden_size"),
        heads=below.size("num_heads", "num_attention_heads"),
        ffn=below.size("intermediate_size"),
        patch=_patch(below),
        window=below.size("window_size"),
        full_layers=tuple(each for each in below.numbers("fullatt_block_indexes") if each < layers),
        frames=below.size("temporal_patch_size"),
        block=VisionBlock(gated=True, rms_norm=True, activation=_activation(below, "silu")),
        ends=VisionEnds(positions_per_second=below.size("tokens_per_second", default=0, least=0)),
    )


def _llava(fields: Fields) -> VlmSpec:
    """Return the shape of LLaVA 1.5: CLIP up to the tapped layer, two matmuls, a decoder; an image is one tile."""
    below = fields.below("vision_config")
    if (kind := below.word("model_type", default="clip_vision_model")) != "clip_vision_model":
        raise _cannot(f"its vision is {show(kind)}, and not clip_vision_model", fields.where)
    text = fields.below("text_config")
    given = {name: value for name, value in text.config.items() if value is not None}
    usual = _LLAMA if given.get("model_type", "llama") == "llama" else {}
    given = {"model_type": "llama", **usual, **given, "tie_word_embeddings": _tied(fields, text)}
    for name, value, plain in (
        ("projector_hidden_act", fields.word("projector_hidden_act", default="gelu"), "gelu"),
        ("multimodal_projector_bias", fields.boolean("multimodal_projector_bias", default=True), True),
        ("vision_feature_select_strategy", fields.word("vision_feature_select_strategy", default="default"), "default"),
    ):
        if value != plain:
            raise _cannot(f"{name} is {show(value)}", fields.where)
    return VlmSpec(
        name="llava",
        vision=_clip_vision(fields, below.assuming(USUAL["clip_vision_model"])),
        projector=ProjectorSpec(merge=1, normed=False),
        language=spec_from_hf(given, where=text.where),
        image_token=fields.integer("image_token_index", "image_token_id", default=32000),
        max_tiles=1,
    )


def _llava_onevision(fields: Fields) -> VlmSpec:
    """Return the shape of LLaVA-OneVision: SigLIP, two matmuls, a newline after each row of tokens, a decoder."""
    below = fields.below("vision_config").assuming(USUAL["siglip_vision_model"] | _ONEVISION_TOWER)
    if (kind := below.word("model_type", default="siglip_vision_model")) != "siglip_vision_model":
        raise _cannot(f"its vision is {show(kind)}, and not siglip_vision_model", fields.where)
    text = fields.below("text_config")
    for name, value, plain in (
        ("projector_hidden_act", fields.word("projector_hidden_act", default="gelu"), "gelu"),
        ("multimodal_projector_bias", fields.boolean("multimodal_projector_bias", default=True), True),
        ("vision_feature_select_strategy", fields.word("vision_feature_select_strategy", default="full"), "full"),
        ("vision_feature_layer", fields.config.get("vision_feature_layer", -1), -1),
        ("vision_aspect_ratio", fields.word("vision_aspect_ratio", default="anyres_max_9"), "anyres_max_9"),
    ):
        if value != plain:
            raise _cannot(f"{name} is {show(value)}", fields.where)
    tile = below.sides("image_size")[0]
    given = {"model_type": "qwen2", **text.config, "tie_word_embeddings": _tied(fields, text)}
    return VlmSpec(
        name="llava_onevision",
        vision=VisionSpec(
            layers=below.size("num_hidden_layers"),
            hidden=below.size("hidden_size"),
            heads=below.size("num_attention_heads"),
            ffn=below.size("intermediate_size"),
            patch=_patch(below),
            variant="anyres",
            tile=tile,
            block=VisionBlock(
                activation=_activation(below, "gelu_pytorch_tanh"),
                norm_eps=below.number("layer_norm_eps", default=1e-6),
            ),
            ends=VisionEnds(stem_bias=True, table=tile // _patch(below), mean=(0.5,) * 3, std=(0.5,) * 3),
        ),
        projector=ProjectorSpec(merge=1, normed=False),
        language=spec_from_hf(given, where=text.where),
        image_token=fields.integer("image_token_index", "image_token_id", default=151646),
        max_tiles=_tile_grid(fields, tile),
    )


def _tile_grid(fields: Fields, tile: int) -> int:
    """Return the most tiles of an image: those of a square grid, any part of which an image may take."""
    points = fields.config.get("image_grid_pinpoints")
    if points is None:
        return _ONEVISION_SIDE**2
    side = math.isqrt(len(points)) if isinstance(points, list) else 0
    every = [[row * tile, column * tile] for row in range(1, side + 1) for column in range(1, side + 1)]
    if not side or [list(each) for each in points] != every:
        raise _cannot("its image_grid_pinpoints are not all grids up to a square one", fields.where)
    return side**2


def _clip_vision(fields: Fields, below: Fields) -> VisionSpec:
    layers, tapped = below.size("num_hidden_layers"), fields.config.get("vision_feature_layer", -2)
    if not isinstance(tapped, int) or isinstance(tapped, bool) or not -layers <= tapped <= layers or tapped == 0:
        raise _cannot(f"vision_feature_layer is {show(tapped)} of {layers} layers", fields.where)
    return VisionSpec(
        layers=tapped if tapped > 0 else layers + 1 + tapped,
        hidden=below.size("hidden_size"),
        heads=below.size("num_attention_heads"),
        ffn=below.size("intermediate_size"),
        patch=_patch(below),
        variant="tiled",
        tile=below.sides("image_size")[0],
        block=VisionBlock(
            activation=_activation(below, "quick_gelu"), norm_eps=below.number("layer_norm_eps", default=1e-5)
        ),
        ends=VisionEnds(class_token=True, first_norm=True, table=below.sides("image_size")[0] // _patch(below)),
    )


def _patch(below: Fields) -> int:
    if (channels := below.integer("in_channels", "in_chans", "num_channels", default=3)) != 3:
        raise _cannot(f"its images have {channels} channels", below.where)
    return below.sides("patch_size")[0]


def _activation(below: Fields, usual: str) -> Activation:
    word = below.word("hidden_act", default=usual)
    if word not in ACTIVATIONS:
        raise _cannot(f"hidden_act of its vision is {show(word)}", below.where)
    return ACTIVATIONS[word]


def _tied(fields: Fields, text: Fields) -> bool:
    if fields.word("model_type", default="") == "qwen3_vl_moe":
        # transformers writes true into the language part, and ignores it.
        return fields.boolean("tie_word_embeddings", default=False)
    # Before transformers 5, either the language part or the whole configuration had it.
    return any(each.boolean("tie_word_embeddings", default=False) for each in (fields, text))


def _cannot(what: str, where: str) -> UserError:
    return UserError("M034", f"the vlm family does not support this model: {what}", where=where,
                     fix="use one of the models in docs/guides/vlm.md, or a preset")  # fmt: skip


READERS: dict[str, Callable[[Fields], VlmSpec]] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen_3,
    "qwen3_vl_moe": _qwen_3,
    "llava": _llava,
    ONEVISION: _llava_onevision,
    OWN_LAYOUT: lambda fields: internvl_spec(fields, _cannot),
    CHAT: lambda fields: internvl_spec(fields, _cannot),
    OWN: _own,
}
