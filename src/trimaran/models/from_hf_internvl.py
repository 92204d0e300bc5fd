"""Converts the config.json of InternVL 2, 2.5 and 3 to a VlmSpec: OpenGVLab's own layout, and that of transformers."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from trimaran.core import UserError
from trimaran.models.config_fields import Fields, show
from trimaran.models.from_hf import spec_from_hf
from trimaran.models.hf_vision import USUAL
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
)

CHAT, OWN_LAYOUT = INTERNVL_CHAT, "internvl"
QK_NORM_EPS = 1e-6  # transformers' InternVL has no field for it
MOST_TILES = 12
# The fields in which we write the ids of the image tokens; the published folders have them in their tokenizer only.
TOKEN_FIELDS = {"<IMG_CONTEXT>": "image_token_id", "<img>": "image_start_token_id", "</img>": "image_end_token_id"}

Refuse = Callable[[str, str], UserError]


def internvl_spec(fields: Fields, refuse: Refuse) -> VlmSpec:
    """Return the shape of an InternVL model. `refuse` makes the error for a feature that we lack.

    Images are 1 to `max_dynamic_patch` tiles, followed by a thumbnail if there are several. The ids of the image tokens
    must be in the fields: see `models.internvl_tokens`.
    """
    is_chat = fields.word("model_type", default="") == CHAT
    below = fields.below("vision_config")
    below = below.assuming(USUAL["intern_vit_6b" if is_chat else "internvl_vision"])
    layout: Literal["", "internvl_chat", "internvl_internlm2"] = ""
    text = fields.below("llm_config" if is_chat else "text_config")
    if is_chat:
        _refuse_chat_options(fields, refuse)
        layout = chat_layout(fields)
    _refuse_options(fields, below, refuse)
    image, start, end = _tokens(fields)
    dynamic = fields.boolean("dynamic_image_size", default=True)
    return VlmSpec(
        name=fields.word("model_type", default=""),
        vision=_vision(fields, below, refuse),
        projector=ProjectorSpec(kind="pixel-shuffle", merge=2),
        language=_language(fields, text, refuse, is_chat=is_chat),
        image_token=image,
        before=start,
        after=end,
        max_tiles=fields.size("max_dynamic_patch", default=MOST_TILES) if dynamic else 1,
        layout=layout,
    )


def chat_layout(fields: Fields) -> Literal["internvl_chat", "internvl_internlm2"]:
    """Return the layout of a folder of OpenGVLab's: InternLM2 has its own names of weights."""
    text = fields.below("llm_config")
    is_internlm = text.word("model_type", default=_type_of(text)) == "internlm2"
    return "internvl_internlm2" if is_internlm else "internvl_chat"


def _vision(fields: Fields, below: Fields, refuse: Refuse) -> VisionSpec:
    layers = below.size("num_hidden_layers")
    tapped = fields.integer("select_layer", "vision_feature_layer", default=-1)
    if not -layers <= tapped <= layers or tapped == 0:
        raise refuse(f"its features are those of layer {tapped} of {layers}", fields.where)
    patch, table = below.sides("patch_size")[0], below.sides("image_size")[0]
    tile = fields.sides("force_image_size")[0] if fields.has("force_image_size") else table
    qk_norm = below.boolean("use_qk_norm", "qk_normalization", default=False)
    thumbnail = fields.boolean("use_thumbnail", default=True)
    rms_norm = below.word("norm_type", default="layer_norm") == "rms_norm"
    if qk_norm and not rms_norm:
        raise refuse("it has RMS norms of queries and keys beside layer norms", below.where)
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
        ends=VisionEnds(
            class_token=True,
            stem_bias=True,
            table=table // patch,
            thumbnail="last" if thumbnail else "none",
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        ),
    )


def _refuse_options(fields: Fields, below: Fields, refuse: Refuse) -> None:
    """Raise if the model has a feature that our network lacks."""
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
            raise refuse(f"{name} is {show(part.config[name])}", part.where)


def _refuse_chat_options(fields: Fields, refuse: Refuse) -> None:
    # In version v1 the tokens of a tile were transposed, by mistake. The class of the configuration has it as default.
    version = fields.word("ps_version", default="v2")
    if version != "v2":
        raise refuse(f"ps_version is {show(version)}", fields.where)
    for name in ("use_backbone_lora", "use_llm_lora"):
        if fields.integer(name, default=0):
            raise refuse(f"its weights hold a LoRA adapter: {name}", fields.where)


def _type_of(text: Fields) -> str:
    """Return the model type of a language part that names only its class, as InternVL's own configurations do."""
    named = text.config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    return {"InternLM2ForCausalLM": "internlm2", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}.get(
        name, "llama"
    )


def _language(fields: Fields, text: Fields, refuse: Refuse, *, is_chat: bool) -> ModelSpec:
    """Return the decoder. InternLM2 is a Llama under other names; its rotary scaling begins after its context."""
    given: dict[str, Any] = {"model_type": _type_of(text)}
    given |= {name: value for name, value in text.config.items() if value is not None}
    if given["model_type"] == "internlm2":
        if given.pop("bias", False):
            raise refuse("its InternLM2 has biases", text.where)
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
        raise refuse("its language model is a mixture of experts", text.where)
    return language


def _tokens(fields: Fields) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the image token, and the tokens before and after an image."""
    image, start, end = (TOKEN_FIELDS[token] for token in TOKEN_FIELDS)
    if not fields.has(image):
        raise UserError("M074", "neither config.json nor the tokenizer says which token stands for an image",
                        where=fields.where,
                        fix=f"put the folder's tokenizer files beside it, or set {image} to the id of "
                        "<IMG_CONTEXT>")  # fmt: skip
    return fields.integer(image), fields.numbers(start), fields.numbers(end)
