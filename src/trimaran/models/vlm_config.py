"""The config.json of a vision-language model, as our spec of it and back."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

from trimaran.core import UserError
from trimaran.models.config_fields import Fields, bad_field, changed, show
from trimaran.models.from_hf import spec_from_hf, spec_to_hf
from trimaran.models.internvl import (
    CHAT,
    OWN_LAYOUT,
    QK_NORM_EPS,
    cannot_read,
    chat_config,
    chat_layout,
    internvl_config,
    internvl_spec,
    is_internvl,
    tower_sizes,
)
from trimaran.models.outline_hf import USUAL
from trimaran.models.validate_spec import first_invalid_field
from trimaran.models.vlm_spec import (
    ProjectorSpec,
    VisionBlock,
    VisionEnds,
    VisionSpec,
    VlmSpec,
    equals_but,
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
PLAIN_VISION_BLOCK = VisionBlock()


def vlm_from_disk(config: Mapping[str, Any], *, where: str) -> VlmSpec:
    """Return the shape that `config` describes. `where` names the configuration in errors."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        raise cannot_read(f"model_type is {show(kind)}; it supports {', '.join(READERS)}", where)
    spec = READERS[kind](Fields(config, where))
    if problem := first_invalid_field(spec):
        raise bad_field(problem[0], problem[1], where)
    return spec


def _own(fields: Fields) -> VlmSpec:
    try:
        return changed(VlmSpec, None, {"name": OWN} | dict(fields.below("shape").config), "shape")
    except UserError as error:
        raise bad_field(error.where, error.what, fields.where) from None


def _read_qwen(fields: Fields) -> VlmSpec:
    """Return the shape of Qwen2-VL, Qwen2.5-VL or Qwen3-VL.

    The last has learned and rotary positions, features of several layers, and interleaved M-RoPE.
    """
    kind = fields.word("model_type", default="")
    is_3, is_moe = kind.startswith("qwen3"), kind == "qwen3_vl_moe"
    below = fields.below("vision_config").assuming(USUAL[kind])
    text = fields if not is_3 and not fields.has("text_config") else fields.below("text_config")
    rope_field = "rope_parameters" if is_3 else "rope_scaling"
    rope = text.config.get("rope_parameters") or text.config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise bad_field(rope_field, f"{show(rope)} is not a mapping", text.where)
    if kinds := {rope.get(name) for name in ("type", "rope_type")} - {None, "mrope", "default"}:
        raise cannot_read(f"rope_type is {show(kinds.pop())}", text.where)
    theta = rope.get("rope_theta") or text.config.get("rope_theta") or (_QWEN_3_THETA if is_3 else _QWEN_THETA)
    plain: dict[str, Any] = {"model_type": "qwen3" if is_3 else "qwen2", "rope_parameters": None, "rope_scaling": None}
    plain |= {"rope_theta": theta, "tie_word_embeddings": _tied(fields, text)}
    if is_moe:  # its router has no option not to normalise
        plain |= {"model_type": "qwen3_moe", "norm_topk_prob": True}
    language = spec_from_hf({**text.config, **plain}, where=text.where)
    width = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
    if (out := below.size(width, default=language.hidden)) != language.hidden:
        raise bad_field(f"vision_config.{width}", f"{out} is not the language's {language.hidden}", fields.where)
    frames, merge = below.size("temporal_patch_size"), below.size("spatial_merge_size", default=2)
    if kind == "qwen2_vl":
        hidden = below.size("embed_dim")
        ffn = int(hidden * below.number("mlp_ratio"))
        vision = _tower(below, "quick_gelu", hidden=hidden, ffn=ffn, frames=frames)
    elif kind == "qwen2_5_vl":
        layers = below.size("depth")
        vision = _tower(
            below,
            "silu",
            layers=layers,
            window=below.size("window_size"),
            full_layers=tuple(each for each in below.numbers("fullatt_block_indexes") if each < layers),
            frames=frames,
            block=VisionBlock(gated=True, rms_norm=True),
            ends=VisionEnds(positions_per_second=below.size("tokens_per_second", default=0, least=0)),
        )
    else:
        places = below.size("num_position_embeddings")
        if (side := math.isqrt(places)) ** 2 != places:
            raise bad_field("num_position_embeddings", f"{places} positions are not a square", below.where)
        ends = VisionEnds(stem_bias=True, table=side, mean=(0.5,) * 3, std=(0.5,) * 3)
        vision = _tower(below, "gelu_pytorch_tanh", frames=frames, ends=ends)
    image, start, end = (fields.integer(name, default=usual) for name, usual in _QWEN_TOKENS.items())
    sections = Fields(rope, text.where).numbers("mrope_section") or (_QWEN_3_SECTIONS if is_3 else _QWEN_SECTIONS)
    if is_3 and len(sections) != 3:
        raise bad_field("mrope_section", f"{list(sections)} are not those of time, row and column", text.where)
    spec = VlmSpec(
        name=kind,
        vision=vision,
        projector=ProjectorSpec(
            merge=merge,
            hidden=vision.hidden * merge * merge,
            deepstack=below.numbers("deepstack_visual_indexes") if is_3 else (),
        ),
        language=language,
        image_token=image,
        before=(start,),
        after=(end,),
        sections=interleaved_sections(sections, language.head_dim // 2) if is_3 else sections,
    )
    return replace(spec, min_pixels=256 * 256, max_pixels=4096 * 4096) if is_3 else spec


def _tower(
    below: Fields,
    usual_activation: str,
    *,
    layers: int = 0,
    hidden: int = 0,
    ffn: int = 0,
    block: VisionBlock = PLAIN_VISION_BLOCK,
    **others: Any,
) -> VisionSpec:
    """Return a vision tower. Most families name its sizes alike; those that are 0 are read."""
    if (word := below.word("hidden_act", default=usual_activation)) not in ACTIVATIONS:
        raise cannot_read(f"hidden_act of its vision is {show(word)}", below.where)
    return VisionSpec(
        layers=layers or below.size("depth", "num_hidden_layers"),
        hidden=hidden or below.size("hidden_size"),
        heads=below.size("num_heads", "num_attention_heads"),
        ffn=ffn or below.size("intermediate_size"),
        patch=_patch(below),
        block=replace(block, activation=ACTIVATIONS[word]),
        **others,
    )


def _read_llava(fields: Fields) -> VlmSpec:
    """Return the shape of LLaVA 1.5: CLIP up to the tapped layer, two matmuls, a decoder; an image is one tile."""
    below, text = fields.below("vision_config"), fields.below("text_config")
    _refuse_kind(fields, below, "clip_vision_model")
    given = {name: value for name, value in text.config.items() if value is not None}
    usual = _LLAMA if given.get("model_type", "llama") == "llama" else {}
    given = {"model_type": "llama", **usual, **given, "tie_word_embeddings": _tied(fields, text)}
    _refuse_options(fields, {"vision_feature_select_strategy": "default"})
    below = below.assuming(USUAL["clip_vision_model"])
    layers, tapped = below.size("num_hidden_layers"), fields.config.get("vision_feature_layer", -2)
    if not isinstance(tapped, int) or isinstance(tapped, bool) or not -layers <= tapped <= layers or tapped == 0:
        raise cannot_read(f"vision_feature_layer is {show(tapped)} of {layers} layers", fields.where)
    tile = below.sides("image_size")[0]
    vision = _tower(
        below,
        "quick_gelu",
        layers=tapped if tapped > 0 else layers + 1 + tapped,
        variant="tiled",
        tile=tile,
        block=VisionBlock(norm_eps=below.number("layer_norm_eps", default=1e-5)),
        ends=VisionEnds(class_token=True, first_norm=True, table=tile // _patch(below)),
    )
    return VlmSpec(
        name="llava",
        vision=vision,
        projector=ProjectorSpec(merge=1, normed=False),
        language=spec_from_hf(given, where=text.where),
        image_token=fields.integer("image_token_index", "image_token_id", default=32000),
        max_tiles=1,
    )


def _read_onevision(fields: Fields) -> VlmSpec:
    """Return the shape of LLaVA-OneVision: SigLIP, two matmuls, a newline after each row of tokens, a decoder."""
    below, text = fields.below("vision_config"), fields.below("text_config")
    below = below.assuming(USUAL["siglip_vision_model"] | _ONEVISION_TOWER)
    _refuse_kind(fields, below, "siglip_vision_model")
    options = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    _refuse_options(fields, options | {"vision_aspect_ratio": "anyres_max_9"})
    tile = below.sides("image_size")[0]
    given = {"model_type": "qwen2", **text.config, "tie_word_embeddings": _tied(fields, text)}
    side, points = _ONEVISION_SIDE, fields.config.get("image_grid_pinpoints")
    if points is not None:  # the grids up to a square one, any part of which an image may take
        side = math.isqrt(len(points)) if isinstance(points, list) else 0
        every = [[row * tile, column * tile] for row in range(1, side + 1) for column in range(1, side + 1)]
        if not side or [list(each) for each in points] != every:
            raise cannot_read("its image_grid_pinpoints are not all grids up to a square one", fields.where)
    vision = _tower(
        below,
        "gelu_pytorch_tanh",
        variant="anyres",
        tile=tile,
        block=VisionBlock(norm_eps=below.number("layer_norm_eps", default=1e-6)),
        ends=VisionEnds(stem_bias=True, table=tile // _patch(below), mean=(0.5,) * 3, std=(0.5,) * 3),
    )
    return VlmSpec(
        name="llava_onevision",
        vision=vision,
        projector=ProjectorSpec(merge=1, normed=False),
        language=spec_from_hf(given, where=text.where),
        image_token=fields.integer("image_token_index", "image_token_id", default=151646),
        max_tiles=side**2,
    )


def _refuse_kind(fields: Fields, below: Fields, needed: str) -> None:
    if (kind := below.word("model_type", default=needed)) != needed:
        raise cannot_read(f"its vision is {show(kind)}, and not {needed}", fields.where)


def _refuse_options(fields: Fields, plain: Mapping[str, Any]) -> None:
    """Raise if LLaVA's projector, or the tapping of its vision tower, is not as in these options."""
    expected: dict[str, Any] = {"projector_hidden_act": "gelu", "multimodal_projector_bias": True, **plain}
    for name, wanted in expected.items():
        if name == "vision_feature_layer":
            value = fields.config.get(name, wanted)
        else:
            value = (fields.boolean if isinstance(wanted, bool) else fields.word)(name, default=wanted)
        if value != wanted:
            raise cannot_read(f"{name} is {show(value)}", fields.where)


def _patch(below: Fields) -> int:
    if (channels := below.integer("in_channels", "in_chans", "num_channels", default=3)) != 3:
        raise cannot_read(f"its images have {channels} channels", below.where)
    return below.sides("patch_size")[0]


def _tied(fields: Fields, text: Fields) -> bool:
    if fields.word("model_type", default="") == "qwen3_vl_moe":
        # transformers writes true into the language part, and ignores it.
        return fields.boolean("tie_word_embeddings", default=False)
    # Before transformers 5, either the language part or the whole configuration had it.
    return any(each.boolean("tie_word_embeddings", default=False) for each in (fields, text))


READERS: dict[str, Callable[[Fields], VlmSpec]] = {
    "qwen2_vl": _read_qwen,
    "qwen2_5_vl": _read_qwen,
    "qwen3_vl": _read_qwen,
    "qwen3_vl_moe": _read_qwen,
    "llava": _read_llava,
    ONEVISION: _read_onevision,
    OWN_LAYOUT: internvl_spec,
    CHAT: internvl_spec,
    OWN: _own,
}


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
    writers = {"llava": _written_llava, OWN_LAYOUT: internvl_config}
    return config | writers.get(form, _written_qwen)(spec)


def disk_form(spec: VlmSpec) -> Form:
    """Return the architecture that has exactly the features of `spec`."""
    if _is_qwen(spec):
        block = spec.vision.block
        is_plain = not (block.gated or block.rms_norm or spec.vision.window or spec.vision.ends.positions_per_second)
        if is_plain and spec.vision.ffn % spec.vision.hidden == 0:
            return "qwen2_vl"
        if block.gated and block.rms_norm and spec.vision.window:
            return "qwen2_5_vl"
    if _is_qwen_3(spec):
        return "qwen3_vl_moe" if spec.language.block.experts else "qwen3_vl"
    if is_internvl(spec):
        vision = spec.vision  # transformers has no field for the epsilon of these norms
        has_its_norms = not vision.block.qk_norm or vision.block.norm_eps == QK_NORM_EPS
        if spec.layout or (vision.table_side == vision.tile_side and has_its_norms):
            return spec.layout or OWN_LAYOUT
    return "llava" if _is_llava(spec) else OWN


def form_of_config(config: Mapping[str, Any]) -> Form:
    """Return the format of the weights beside this config.json."""
    if config["model_type"] != CHAT:
        return config["model_type"]
    return chat_layout(Fields(config, "config.json"))


def _is_qwen(spec: VlmSpec) -> bool:
    vision, language, block = spec.vision, spec.language, spec.language.block
    return (
        vision.variant == "native"
        and equals_but(vision.block, PLAIN_VISION_BLOCK, "gated", "rms_norm", "activation")
        and equals_but(vision.ends, VisionEnds(), "mean", "std", "positions_per_second")
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
        # Experts must be those of Qwen3-MoE, as the router of Qwen3-VL weights them.
        and (block.experts is None or block.experts.normalize_top_k)
        and (block.experts is None or spec_to_hf(spec.language)["model_type"] == "qwen3_moe")
    )


def axis_pairs(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many pairs of features follow time, row and column."""
    return tuple(sum(sections[axis::3]) for axis in range(3))


def _written_qwen(spec: VlmSpec) -> dict[str, Any]:
    vision, form, text = spec.vision, disk_form(spec), spec_to_hf(spec.language)
    is_3 = form.startswith("qwen3")
    del text["architectures"]
    text["model_type"] = f"{form}_text"
    if is_3:
        text["attention_bias"], sections = False, list(axis_pairs(spec.sections))
        text["rope_scaling"] = {"rope_type": "default", "mrope_section": sections, "mrope_interleaved": True}
    else:
        del text["head_dim"]
        text["rope_scaling"] = {"type": "mrope", "rope_type": "default", "mrope_section": list(spec.sections)}
    config: dict[str, Any] = {
        "model_type": form if is_3 else f"{form}_vision",
        "depth": vision.layers,
        "num_heads": vision.heads,
        "hidden_act": _ON_DISK[vision.block.activation],
        "in_channels": 3,
        "patch_size": vision.patch,
        "spatial_merge_size": spec.projector.merge,
        "temporal_patch_size": vision.frames,
    }
    if form == "qwen2_vl":
        config |= {"embed_dim": vision.hidden, "hidden_size": spec.hidden, "mlp_ratio": vision.ffn // vision.hidden}
    else:
        config |= {"hidden_size": vision.hidden, "out_hidden_size": spec.hidden, "intermediate_size": vision.ffn}
    if is_3:
        config |= {"num_position_embeddings": vision.ends.table**2}
        config |= {"deepstack_visual_indexes": list(spec.projector.deepstack)}
    elif form == "qwen2_5_vl":
        config |= {"window_size": vision.window, "fullatt_block_indexes": list(vision.full_layers)}
        if vision.ends.positions_per_second:
            config["tokens_per_second"] = vision.ends.positions_per_second
    taken = {spec.image_token, *spec.before, *spec.after}
    return {
        "text_config": text,
        "vision_config": config,
        "image_token_id": spec.image_token,
        "vision_start_token_id": spec.before[0],
        "vision_end_token_id": spec.after[0],
        "video_token_id": next(each for each in range(spec.image_token + 1, spec.vocab + 4) if each not in taken),
        "tie_word_embeddings": spec.tied,
    }


def _is_llava(spec: VlmSpec) -> bool:
    vision = spec.vision
    return (
        (vision.variant, vision.frames) == ("tiled", 1)
        and equals_but(vision.block, PLAIN_VISION_BLOCK, "activation", "norm_eps")
        and equals_but(vision.ends, VisionEnds(class_token=True, first_norm=True), "table", "mean", "std")
        and (spec.projector.kind, spec.projector.normed, spec.projector.merge) == ("mlp", False, 1)
        and spec.projector_middle == spec.hidden
        and spec.max_tiles == 1
        and vision.table_side == vision.tile_side
        and not (spec.sections or spec.before or spec.after)
    )


def _written_llava(spec: VlmSpec) -> dict[str, Any]:
    vision = spec.vision
    return {
        "text_config": spec_to_hf(spec.language),
        "vision_config": {
            "model_type": "clip_vision_model",
            **tower_sizes(vision),
            "hidden_act": _ON_DISK[vision.block.activation],
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
