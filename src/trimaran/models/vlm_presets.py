"""Vision-language presets by name, from tiny to 6B vision + 20B language, as published."""

from dataclasses import replace
from typing import Any

from trimaran.models.model_presets import PRESETS
from trimaran.models.rope import Rope
from trimaran.models.spec import Block, ModelSpec
from trimaran.models.vlm_spec import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ProjectorSpec,
    VisionBlock,
    VisionEnds,
    VisionSpec,
    VlmSpec,
    interleaved_sections,
)

_QWEN_TEXT = Block(norm_eps=1e-6, qkv_bias=True, rope=Rope(theta=1_000_000.0))
_QWEN_2_VISION = VisionSpec(
    layers=32, hidden=1280, heads=16, ffn=5120, patch=14, frames=2, block=VisionBlock(activation="quick-gelu")
)
_QWEN_25_VISION = VisionSpec(
    layers=32,
    hidden=1280,
    heads=16,
    ffn=3420,
    patch=14,
    window=112,
    full_layers=(7, 15, 23, 31),
    frames=2,
    block=VisionBlock(gated=True, rms_norm=True, activation="silu"),
    ends=VisionEnds(positions_per_second=2),
)
_QWEN_MERGER = ProjectorSpec(merge=2, hidden=4 * 1280)
# 336 pixels per side. LLaVA taps the last but one of CLIP's 24 layers; the last one is left out.
_CLIP_VISION = VisionSpec(
    layers=23,
    hidden=1024,
    heads=16,
    ffn=4096,
    patch=14,
    variant="tiled",
    tile=336,
    block=VisionBlock(activation="quick-gelu", norm_eps=1e-5),
    ends=VisionEnds(class_token=True, first_norm=True),
)
_INTERN_VIT_6B = VisionSpec(
    layers=45,
    hidden=3200,
    heads=25,
    ffn=12800,
    patch=14,
    variant="tiled",
    tile=448,
    block=VisionBlock(rms_norm=True, qkv_bias=False, qk_norm=True, scaled=True),
    ends=VisionEnds(class_token=True, stem_bias=True, thumbnail="last", mean=IMAGENET_MEAN, std=IMAGENET_STD),
)
_INTERNLM_20B = ModelSpec(
    name="internlm2-20b",
    layers=48,
    hidden=6144,
    heads=48,
    kv_heads=8,
    head_dim=128,
    ffn=16384,
    vocab=92553,
    max_seq_len=32768,
    block=Block(rope=Rope(theta=1_000_000.0)),
)


def _text(name: str, max_seq_len: int) -> ModelSpec:
    return replace(PRESETS[name], max_seq_len=max_seq_len, block=_QWEN_TEXT)


def _qwen(name: str, vision: VisionSpec, language: ModelSpec) -> VlmSpec:
    return VlmSpec(
        name=name,
        vision=vision,
        projector=_QWEN_MERGER,
        language=language,
        image_token=151655,
        before=(151652,),
        after=(151653,),
        sections=(16, 24, 24),
    )


# Both tiny presets read bytes (0 to 256) and three more tokens; their images are a few dozen pixels per side.
_TINY_VISION = VisionSpec(layers=4, hidden=96, heads=4, ffn=384, patch=8, frames=2)
_TINY = VlmSpec(
    name="tiny",
    vision=_TINY_VISION,
    projector=ProjectorSpec(merge=2, hidden=4 * 96),
    language=replace(PRESETS["tiny"], block=Block(norm_eps=1e-6, qkv_bias=True)),
    image_token=257,
    before=(258,),
    after=(259,),
    sections=(4, 6, 6),
    min_pixels=32 * 32,
    max_pixels=96 * 96,
)
_TINY_TILED = replace(
    _TINY,
    name="tiny-tiled",
    vision=replace(
        _TINY_VISION,
        variant="tiled",
        tile=48,
        frames=1,
        block=VisionBlock(norm_eps=1e-5),
        ends=VisionEnds(class_token=True, stem_bias=True),
    ),
    projector=ProjectorSpec(kind="pixel-shuffle", merge=2),
    language=PRESETS["tiny"],
    sections=(),
    max_tiles=4,
)


def _qwen_3_vision(**changes: Any) -> VisionSpec:
    spec = VisionSpec(
        layers=27,
        hidden=1152,
        heads=16,
        ffn=4304,
        patch=16,
        frames=2,
        block=VisionBlock(activation="gelu-tanh"),
        ends=VisionEnds(stem_bias=True, table=48, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
    )
    return replace(spec, **changes)


def _qwen_3(name: str, vision: VisionSpec, language: ModelSpec, deepstack: tuple[int, ...]) -> VlmSpec:
    return VlmSpec(
        name=name,
        vision=vision,
        projector=ProjectorSpec(merge=2, hidden=4 * vision.hidden, deepstack=deepstack),
        language=replace(language, max_seq_len=262144, block=replace(language.block, rope=Rope(theta=5_000_000.0))),
        image_token=151655,
        before=(151652,),
        after=(151653,),
        sections=interleaved_sections((24, 20, 20), 64),
        min_pixels=256 * 256,
        max_pixels=4096 * 4096,
    )


_TABLE = (
    _TINY,
    _TINY_TILED,
    _qwen("qwen2-vl-2b", _QWEN_2_VISION, _text("qwen2.5-1.5b", 32768)),
    _qwen("qwen2-vl-7b", _QWEN_2_VISION, _text("qwen2.5-7b", 32768)),
    _qwen("qwen2.5-vl-3b", _QWEN_25_VISION, _text("qwen2.5-3b", 128000)),
    _qwen("qwen2.5-vl-7b", _QWEN_25_VISION, _text("qwen2.5-7b", 128000)),
    _qwen_3(
        "qwen3-vl-4b", _qwen_3_vision(layers=24, hidden=1024, ffn=4096), PRESETS["qwen3-4b"], deepstack=(5, 11, 17)
    ),
    _qwen_3("qwen3-vl-8b", _qwen_3_vision(), PRESETS["qwen3-8b"], deepstack=(8, 16, 24)),
    _qwen_3("qwen3-vl-30b-a3b", _qwen_3_vision(), PRESETS["qwen3-30b-a3b"], deepstack=(8, 16, 24)),
    VlmSpec(
        name="llava-1.5-7b",
        vision=_CLIP_VISION,
        projector=ProjectorSpec(merge=1, normed=False),
        language=replace(PRESETS["llama-2-7b"], vocab=32064),
        image_token=32000,
        max_tiles=1,
    ),
    VlmSpec(
        name="internvl-26b",
        vision=_INTERN_VIT_6B,
        projector=ProjectorSpec(kind="pixel-shuffle", merge=2),
        language=_INTERNLM_20B,
        image_token=92546,
        before=(92544,),
        after=(92545,),
    ),
)

VLM_PRESETS: dict[str, VlmSpec] = {spec.name: spec for spec in _TABLE}
