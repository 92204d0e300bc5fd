"""Presets of decoders and of vision-language models by name, as published."""

from dataclasses import replace
from typing import Any

from trimaran.models.spec import AttentionSpec, Block, Ends, ExpertSpec, ModelSpec, NormSpec, Rope
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

_LLAMA_2 = Block()
_LLAMA_3 = Block(rope=Rope(theta=500_000.0))
_LLAMA_31 = Block(rope=Rope(theta=500_000.0, factor=8.0))
_LLAMA_32 = Block(rope=Rope(theta=500_000.0, factor=32.0))
_MISTRAL = Block(rope=Rope(theta=1_000_000.0))  # since its version 0.2, which has no window
_QWEN_25 = Block(norm_eps=1e-6, qkv_bias=True, rope=Rope(theta=1_000_000.0))
_QWEN_25_LARGE = replace(_QWEN_25, norm_eps=1e-5)
_QWEN_3 = Block(norm_eps=1e-6, qk_norm=True, rope=Rope(theta=1_000_000.0))
_QWEN_3_30B, _QWEN_3_235B = (
    replace(_QWEN_3, experts=ExpertSpec(num_experts=128, top_k=8, ffn=ffn, balance=0.001)) for ffn in (768, 1536)
)
_GEMMA_NORMS, _SANDWICH = NormSpec(unit_offset=True), NormSpec(unit_offset=True, placement="both")
_GEMMA = Block(norm_eps=1e-6, norm=_GEMMA_NORMS, ends=Ends(embedding_scale=0.0), activation="gelu_tanh")
_GEMMA_2, _GEMMA_2_27B = (
    replace(
        _GEMMA,
        attention=AttentionSpec(scale=scalar**-0.5, softcap=50.0, windows=(4096, 0)),
        norm=_SANDWICH,
        ends=Ends(embedding_scale=0.0, logit_softcap=30.0),
    )
    for scalar in (256, 144)
)
_GEMMA_3_1B = replace(
    _GEMMA,
    qk_norm=True,
    rope=Rope(theta=1_000_000.0),
    attention=AttentionSpec(scale=256**-0.5, windows=(512,) * 5 + (0,), local_rope=Rope()),
    norm=_SANDWICH,
)
_PHI_4 = Block(rope=Rope(theta=250_000.0))
_OLMO_2 = Block(
    norm_eps=1e-6,
    qk_norm=True,
    rope=Rope(theta=500_000.0),
    attention=AttentionSpec(wide_qk_norm=True),
    norm=NormSpec(placement="after"),
)
_COHERE_NORMS = NormSpec(kind="layer", parallel=True)
_COMMAND_R = Block(rope=Rope(theta=8_000_000.0, interleaved=True), norm=_COHERE_NORMS, ends=Ends(logit_scale=0.0625))
_COMMAND_R7B = Block(
    rope=Rope(theta=50_000.0, interleaved=True),
    attention=AttentionSpec(windows=(4096,) * 3 + (0,), rope_layers=(True, True, True, False)),
    norm=_COHERE_NORMS,
    ends=Ends(logit_scale=0.25),
)
_GLM_4 = Block(
    norm_eps=1e-5, qkv_bias=True, rope=Rope(rotary_dim=64, interleaved=True), norm=NormSpec(placement="both")
)
_TINY_MOE = Block(experts=ExpertSpec(num_experts=8, top_k=2, ffn=96, shared_ffn=192, shared_gate=True))

# See _COLUMNS.
_TABLE: tuple[tuple[Any, ...], ...] = (
    ("tiny", 4, 128, 4, 2, 32, 384, 320, 2048, True, Block()),
    ("tiny-moe", 4, 128, 4, 2, 32, 384, 320, 2048, True, _TINY_MOE),
    ("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096, False, _LLAMA_2),
    ("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000, 4096, False, _LLAMA_2),
    ("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000, 4096, False, _LLAMA_2),
    ("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192, False, _LLAMA_3),
    ("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256, 8192, False, _LLAMA_3),
    ("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, 131072, False, _LLAMA_31),
    ("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256, 131072, False, _LLAMA_31),
    ("llama-3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256, 131072, False, _LLAMA_31),
    ("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, 131072, True, _LLAMA_32),
    ("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256, 131072, True, _LLAMA_32),
    ("tinyllama-1.1b", 22, 2048, 32, 4, 64, 5632, 32000, 2048, False, _LLAMA_2),
    ("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32768, 32768, False, _MISTRAL),
    ("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936, 32768, True, _QWEN_25),
    ("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936, 131072, True, _QWEN_25),
    ("qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, 151936, 32768, True, _QWEN_25),
    ("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, 131072, False, _QWEN_25),
    ("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064, 131072, False, _QWEN_25_LARGE),
    ("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064, 131072, False, _QWEN_25_LARGE),
    ("qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064, 131072, False, _QWEN_25_LARGE),
    ("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, 40960, True, _QWEN_3),
    ("qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, 151936, 40960, True, _QWEN_3),
    ("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936, 40960, True, _QWEN_3),
    ("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, 40960, False, _QWEN_3),
    ("qwen3-14b", 40, 5120, 40, 8, 128, 17408, 151936, 40960, False, _QWEN_3),
    ("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936, 40960, False, _QWEN_3),
    ("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 6144, 151936, 40960, False, _QWEN_3_30B),
    ("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 12288, 151936, 40960, False, _QWEN_3_235B),
    ("gemma-2b", 18, 2048, 8, 1, 256, 16384, 256000, 8192, True, _GEMMA),
    ("gemma-7b", 28, 3072, 16, 16, 256, 24576, 256000, 8192, True, _GEMMA),
    ("gemma-2-2b", 26, 2304, 8, 4, 256, 9216, 256000, 8192, True, _GEMMA_2),
    ("gemma-2-9b", 42, 3584, 16, 8, 256, 14336, 256000, 8192, True, _GEMMA_2),
    ("gemma-2-27b", 46, 4608, 32, 16, 128, 36864, 256000, 8192, True, _GEMMA_2_27B),
    ("gemma-3-1b", 26, 1152, 4, 1, 256, 6912, 262144, 32768, True, _GEMMA_3_1B),
    ("phi-4", 40, 5120, 40, 10, 128, 17920, 100352, 16384, False, _PHI_4),
    ("olmo-2-7b", 32, 4096, 32, 32, 128, 11008, 100352, 4096, False, _OLMO_2),
    ("olmo-2-13b", 40, 5120, 40, 40, 128, 13824, 100352, 4096, False, _OLMO_2),
    ("command-r-35b", 40, 8192, 64, 64, 128, 22528, 256000, 131072, True, _COMMAND_R),
    ("command-r7b", 32, 4096, 32, 8, 128, 14336, 256000, 132096, True, _COMMAND_R7B),
    ("glm-4-9b", 40, 4096, 32, 2, 128, 13696, 151552, 32768, False, _GLM_4),
)
# The architectures that a preset is written as, by how its name starts; the others by their features.
_FAMILIES = {"mistral-": "mistral", "gemma-2-": "gemma2", "gemma-3-": "gemma3_text", "phi-": "phi3"}

_COLUMNS = ("name", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_seq_len", "tied", "block")

PRESETS: dict[str, ModelSpec] = {
    row[0]: ModelSpec(
        **dict(zip(_COLUMNS, row, strict=True)),
        family=next((family for start, family in _FAMILIES.items() if row[0].startswith(start)), ""),
    )
    for row in _TABLE
}


_QWEN_2_VISION = VisionSpec(
    layers=32, hidden=1280, heads=16, ffn=5120, patch=14, frames=2, block=VisionBlock(activation="quick-gelu")
)
_QWEN_25_VISION = replace(
    _QWEN_2_VISION,
    ffn=3420,
    window=112,
    full_layers=(7, 15, 23, 31),
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


_QWEN_TOKENS: dict[str, Any] = {"image_token": 151655, "before": (151652,), "after": (151653,)}


def _qwen(name: str, vision: VisionSpec, text: str, max_seq_len: int) -> VlmSpec:
    language = replace(PRESETS[text], max_seq_len=max_seq_len, block=_QWEN_25)
    sections = (16, 24, 24)
    return VlmSpec(
        name=name, vision=vision, projector=_QWEN_MERGER, language=language, sections=sections, **_QWEN_TOKENS
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


_QWEN_3_VISION = VisionSpec(
    layers=27,
    hidden=1152,
    heads=16,
    ffn=4304,
    patch=16,
    frames=2,
    block=VisionBlock(activation="gelu-tanh"),
    ends=VisionEnds(stem_bias=True, table=48, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
)
_QWEN_3_VISION_4B = replace(_QWEN_3_VISION, layers=24, hidden=1024, ffn=4096)


def _qwen_3(name: str, vision: VisionSpec, text: str, *deepstack: int) -> VlmSpec:
    language = PRESETS[text]
    return VlmSpec(
        name=name,
        vision=vision,
        projector=ProjectorSpec(merge=2, hidden=4 * vision.hidden, deepstack=deepstack),
        language=replace(language, max_seq_len=262144, block=replace(language.block, rope=Rope(theta=5_000_000.0))),
        **_QWEN_TOKENS,
        sections=interleaved_sections((24, 20, 20), 64),
        min_pixels=256 * 256,
        max_pixels=4096 * 4096,
    )


_VLM_TABLE = (
    _TINY,
    _TINY_TILED,
    _qwen("qwen2-vl-2b", _QWEN_2_VISION, "qwen2.5-1.5b", 32768),
    _qwen("qwen2-vl-7b", _QWEN_2_VISION, "qwen2.5-7b", 32768),
    _qwen("qwen2.5-vl-3b", _QWEN_25_VISION, "qwen2.5-3b", 128000),
    _qwen("qwen2.5-vl-7b", _QWEN_25_VISION, "qwen2.5-7b", 128000),
    _qwen_3("qwen3-vl-4b", _QWEN_3_VISION_4B, "qwen3-4b", 5, 11, 17),
    _qwen_3("qwen3-vl-8b", _QWEN_3_VISION, "qwen3-8b", 8, 16, 24),
    _qwen_3("qwen3-vl-30b-a3b", _QWEN_3_VISION, "qwen3-30b-a3b", 8, 16, 24),
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

VLM_PRESETS: dict[str, VlmSpec] = {spec.name: spec for spec in _VLM_TABLE}
