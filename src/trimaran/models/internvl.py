"""The config.json of InternVL 2, 2.5 and 3 and our spec of it: OpenGVLab's own layout, and that of transformers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from trimaran.core import UserError
from trimaran.models.config_fields import Fields, read_json, show
from trimaran.models.from_hf import spec_from_hf, spec_to_hf
from trimaran.models.outline_hf import USUAL
from trimaran.models.spec import ModelSpec
from trimaran.models.vlm_spec import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    INTERNVL_CHAT,
    ProjectorSpec,
    VisionBlock,
    VisionEnds,
    VisionSpec,
    VlmSpec,
    equals_but,
)

CHAT, OWN_LAYOUT = INTERNVL_CHAT, "internvl"
QK_NORM_EPS = 1e-6  # transformers' InternVL has no field for it
PLAIN_ENDS = VisionEnds(class_token=True, stem_bias=True, mean=IMAGENET_MEAN, std=IMAGENET_STD)
MOST_TILES = 12
# The fields in which we write the ids of the image tokens; the published folders have them in their tokenizer only.
TOKEN_FIELDS = {"<IMG_CONTEXT>": "image_token_id", "<img>": "image_start_token_id", "</img>": "image_end_token_id"}


def cannot_read(what: str, where: str) -> UserError:
    """Return the error for a vision-language model with a feature that we lack."""
    return UserError("M034.vlm-family", where=where, text=what)


def internvl_spec(fields: Fields) -> VlmSpec:
    """Return the shape of an InternVL model. The ids of its image tokens must be there: see `with_image_tokens`."""
    is_chat = fields.word("model_type", default="") == CHAT
    below = fields.below("vision_config").assuming(USUAL["intern_vit_6b" if is_chat else "internvl_vision"])
    layout: Literal["", "internvl_chat", "internvl_internlm2"] = ""
    text = fields.below("llm_config" if is_chat else "text_config")
    if is_chat:
        # In version v1 the tokens of a tile were transposed, by mistake. It is the default of the configuration class.
        version = fields.word("ps_version", default="v2")
        if version != "v2":
            raise cannot_read(f"ps_version is {show(version)}", fields.where)
        for name in ("use_backbone_lora", "use_llm_lora"):
            if fields.integer(name, default=0):
                raise cannot_read(f"its weights hold a LoRA adapter: {name}", fields.where)
        layout = chat_layout(fields)
    for part, name, plain in (
        (fields, "downsample_ratio", 0.5),
        (fields, "projector_hidden_act", "gelu"),
        (fields, "vision_feature_select_strategy", "default"),
        (fields, "min_dynamic_patch", 1),
        (below, "hidden_act", "gelu"),
        (below, "use_absolute_position_embeddings", True),
        (below, "use_mean_pooling", True),
        (below, "use_mask_token", False),
    ):
        if part.has(name) and part.config.get(name, plain) != plain:
            raise cannot_read(f"{name} is {show(part.config[name])}", part.where)
    image, start, end = TOKEN_FIELDS.values()
    if not fields.has(image):
        raise UserError("M074.neither-config-json", where=fields.where, image=image)
    dynamic = fields.boolean("dynamic_image_size", default=True)
    return VlmSpec(
        name=fields.word("model_type", default=""),
        vision=_vision(fields, below),
        projector=ProjectorSpec(kind="pixel-shuffle", merge=2),
        language=_language(fields, text, is_chat=is_chat),
        image_token=fields.integer(image),
        before=fields.numbers(start),
        after=fields.numbers(end),
        max_tiles=fields.size("max_dynamic_patch", default=MOST_TILES) if dynamic else 1,
        layout=layout,
    )


def chat_layout(fields: Fields) -> Literal["internvl_chat", "internvl_internlm2"]:
    """Return the layout of a folder of OpenGVLab's: InternLM2 has its own names of weights."""
    text = fields.below("llm_config")
    is_internlm = text.word("model_type", default=_type_of(text)) == "internlm2"
    return "internvl_internlm2" if is_internlm else "internvl_chat"


def _vision(fields: Fields, below: Fields) -> VisionSpec:
    layers = below.size("num_hidden_layers")
    tapped = fields.integer("select_layer", "vision_feature_layer", default=-1)
    if not -layers <= tapped <= layers or tapped == 0:
        raise cannot_read(f"its features are those of layer {tapped} of {layers}", fields.where)
    patch, table = below.sides("patch_size")[0], below.sides("image_size")[0]
    tile = fields.sides("force_image_size")[0] if fields.has("force_image_size") else table
    qk_norm = below.boolean("use_qk_norm", "qk_normalization", default=False)
    rms_norm = below.word("norm_type", default="layer_norm") == "rms_norm"
    if qk_norm and not rms_norm:
        raise cannot_read("it has RMS norms of queries and keys beside layer norms", below.where)
    thumbnail = "last" if fields.boolean("use_thumbnail", default=True) else "none"
    return VisionSpec(
        layers=tapped if tapped > 0 else layers + 1 + tapped,
        hidden=below.size("hidden_size"),
        heads=below.size("num_attention_heads"),
        ffn=below.size("intermediate_size"),
        patch=patch,
        variant="tiled",
        tile=tile,
        block=VisionBlock(
            rms_norm=rms_norm,
            norm_eps=below.number("layer_norm_eps", default=1e-6),
            qkv_bias=below.boolean("qkv_bias", "attention_bias", default=False),
            qk_norm=qk_norm,
            scaled=True,
        ),
        ends=replace(PLAIN_ENDS, table=table // patch, thumbnail=thumbnail),
    )


def _type_of(text: Fields) -> str:
    """Return the model type of a language part that names only its class, as InternVL's own configurations do."""
    named = text.config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    return {"InternLM2ForCausalLM": "internlm2", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}.get(
        name, "llama"
    )


def _language(fields: Fields, text: Fields, *, is_chat: bool) -> ModelSpec:
    """Return the decoder. InternLM2 is a Llama under other names; its rotary scaling begins after its context."""
    given: dict[str, Any] = {"model_type": _type_of(text)}
    given |= {name: value for name, value in text.config.items() if value is not None}
    if given["model_type"] == "internlm2":
        if given.pop("bias", False):
            raise cannot_read("its InternLM2 has biases", text.where)
        scaling = given.get("rope_scaling")
        if isinstance(scaling, Mapping) and scaling.get("type", scaling.get("rope_type")) == "dynamic":
            del given["rope_scaling"]
        given["model_type"] = "llama"
    if is_chat:
        tied = text.boolean("tie_word_embeddings", default=False)
    else:  # as transformers reads it, whose default is true
        tied = fields.boolean("tie_word_embeddings", default=text.boolean("tie_word_embeddings", default=True))
    language = spec_from_hf({**given, "tie_word_embeddings": tied}, where=text.where)
    if language.block.experts is not None:
        raise cannot_read("its language model is a mixture of experts", text.where)
    return language


MAX_TOKENIZER_BYTES = 200_000_000


def with_image_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return `config` with the ids of the image tokens, if it is an InternVL's and lacks them."""
    if config.get("model_type") not in (CHAT, OWN_LAYOUT):
        return dict(config)
    wanted = {token: field for token, field in TOKEN_FIELDS.items() if config.get(field) is None}
    found: dict[str, Any] = {}
    for token, number in _added_tokens(folder) if wanted else ():
        if token in wanted and isinstance(number, int):
            found.setdefault(wanted[token], number)
        if len(found) == len(wanted):
            break
    return {**config, **found}


def _added_tokens(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the tokens that were added to the vocabulary, and their ids, from the smallest file to the largest."""
    yield from _read(folder / "added_tokens.json").items()
    decoder = _read(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, Mapping) else ():
        if isinstance(token, Mapping) and str(number).isdecimal():
            yield token.get("content"), int(number)
    listed = _read(folder / "tokenizer.json").get("added_tokens")
    for token in listed if isinstance(listed, list) else ():
        if isinstance(token, Mapping):
            yield token.get("content"), token.get("id")


def _read(file: Path) -> Mapping[str, Any]:
    """Return the file's mapping; an empty one if it is missing or unreadable: the tokenizer's own checks say why."""
    try:
        return read_json(file, limit_bytes=MAX_TOKENIZER_BYTES) if file.is_file() else {}
    except UserError:
        return {}


def is_internvl(spec: VlmSpec) -> bool:
    """Return whether InternVL has exactly the features of `spec`."""
    vision, block, language = spec.vision, spec.vision.block, spec.language
    return (
        (vision.variant, vision.frames) == ("tiled", 1)
        and equals_but(block, VisionBlock(scaled=True), "rms_norm", "norm_eps", "qkv_bias", "qk_norm")
        and equals_but(vision.ends, PLAIN_ENDS, "table", "thumbnail")
        and (not block.qk_norm or block.rms_norm)
        and (spec.projector.kind, spec.projector.merge, spec.projector_middle) == ("pixel-shuffle", 2, spec.hidden)
        and (len(spec.before), len(spec.after)) == (1, 1)
        and vision.ends.thumbnail != "first"
        and not spec.sections
        and language.block.experts is None
        and (spec.layout != "internvl_internlm2" or language.heads * language.head_dim == language.hidden)
    )


def internvl_config(spec: VlmSpec) -> dict[str, Any]:
    """Return the fields of transformers' InternVL."""
    vision, block = spec.vision, spec.vision.block
    return {
        "text_config": spec_to_hf(spec.language),
        "vision_config": {
            "model_type": "internvl_vision",
            **_tower_fields(vision),
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
    vision, block, language = spec.vision, spec.vision.block, spec_to_hf(spec.language)
    if spec.layout == "internvl_internlm2":
        names = (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "hidden_act",
        )  # fmt: skip
        language = {name: language[name] for name in names if name in language}
        language |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
        language |= {"rope_theta": spec.language.block.rope.theta, "tie_word_embeddings": spec.tied}
    return {
        "llm_config": language,
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "model_type": "intern_vit_6b",
            **_tower_fields(vision),
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


def tower_sizes(vision: VisionSpec) -> dict[str, Any]:
    """Return the fields of a vision tower that InternVL and CLIP name alike."""
    return {
        "hidden_size": vision.hidden,
        "intermediate_size": vision.ffn,
        "num_hidden_layers": vision.layers,
        "num_attention_heads": vision.heads,
        "layer_norm_eps": vision.block.norm_eps,
    }


def _tower_fields(vision: VisionSpec) -> dict[str, Any]:
    norm = "rms_norm" if vision.block.rms_norm else "layer_norm"
    return {**tower_sizes(vision), "hidden_act": "gelu", "norm_type": norm}


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
