"""The architectures of Hugging Face without experts that our decoder is read from and written as."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from trimaran.models.config_fields import Fields, show
from trimaran.models.families.disk_parts import packed_parts
from trimaran.models.families.family_fields import (
    OFF,
    Family,
    layer_types_lack,
    read_head_dim,
    read_longrope,
    read_periodic_windows,
    read_rope,
    read_scaling,
    rope_kind,
    rope_lacks,
    rope_tree,
    rotary_dim,
    write_scaling,
    written_types,
)
from trimaran.models.spec import AttentionSpec, Ends, ModelSpec, NormSpec, Rope

SILU: dict[str, tuple[Any, ...]] = OFF | {"hidden_act": (None, "silu")}
NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (None, False)}
NO_MLP_BIAS: dict[str, tuple[Any, ...]] = {"mlp_bias": (None, False)}
partly_rotated_lacks = partial(rope_lacks, partial=True)


def one_window(fields: Fields) -> AttentionSpec:
    """Return attention with the same window in every layer, or without one."""
    window = fields.integer("sliding_window", default=0)
    return AttentionSpec(windows=(window,) if window else ())


def written_bias(spec: ModelSpec) -> dict[str, Any]:
    return {"attention_bias": spec.block.qkv_bias}


# Llama 2 and 3, and Mistral, which may add a window.
def _llama_block(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    biased = fields.boolean("attention_bias", default=False)
    return {"qkv_bias": biased, "attention": AttentionSpec(out_bias=biased)}


def _llama_lacks(config: Mapping[str, Any]) -> str:
    types = config.get("layer_types") or []
    if not isinstance(types, list) or any(each != "full_attention" for each in types):
        return f"layer_types is {show(types)}"
    return rope_lacks(config)


def _mistral_block(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    # An explicit null is no window; a missing field is the default of transformers.
    is_none = fields.config.get("sliding_window", 4096) is None
    return {"attention": AttentionSpec(windows=() if is_none else (fields.size("sliding_window", default=4096),))}


LLAMA = Family(
    architecture="LlamaForCausalLM",
    positions=2048,
    block=_llama_block,
    off=SILU | NO_MLP_BIAS,
    write=lambda spec: written_bias(spec) if spec.block.qkv_bias else {},
    lacks=_llama_lacks,
)
MISTRAL = Family(
    architecture="MistralForCausalLM",
    positions=131_072,
    block=_mistral_block,
    off=SILU | NO_MLP_BIAS | NO_BIAS | {"layer_types": (None, [])},
    write=lambda spec: {"sliding_window": spec.layer(0).window},
)


# OLMo-2: norms after attention and feed-forward, and norms of queries and keys over all heads together.


def _olmo2_block(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    biased = fields.boolean("attention_bias", default=False)
    attention = AttentionSpec(out_bias=biased, wide_qk_norm=True)
    return {"qkv_bias": biased, "qk_norm": True, "attention": attention, "norm": NormSpec(placement="after")}


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    positions=2048,
    block=_olmo2_block,
    off=SILU,
    norm=("rms_norm_eps", 1e-5),
    write=written_bias,
)


# Cohere's Command R and R7B: LayerNorm, attention and feed-forward in parallel, scaled logits, interleaved pairs.


def _cohere_block(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    return _llama_block(fields, max_seq_len) | {
        "rope": replace(read_rope(fields, max_seq_len), interleaved=True),
        "norm": NormSpec(kind="layer", parallel=True),
        "ends": Ends(logit_scale=fields.number("logit_scale", default=0.0625)),
    }


def _cohere2_block(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    """Return the block of Cohere 2, whose layers without a window have no rotary positions."""
    own = _cohere_block(fields, max_seq_len)
    windows = read_periodic_windows(fields, fields.size("sliding_window_pattern", default=4))
    rotated = tuple(window > 0 for window in windows or (0,))
    attention = replace(own["attention"], windows=windows, rope_layers=() if all(rotated) else rotated)
    return own | {"attention": attention}


def _written_cohere(spec: ModelSpec) -> dict[str, Any]:
    ends = {"layer_norm_eps": spec.block.norm_eps, "logit_scale": spec.block.ends.logit_scale}
    return ends | written_bias(spec)


COHERE = Family(
    architecture="CohereForCausalLM",
    # Command R's config.json has 8,192 positions, but says that the model was trained with model_max_length of them.
    positions=8192,
    more_positions="model_max_length",
    block=_cohere_block,
    # Command R+ has norms of queries and keys with weights of their own for each head.
    off=SILU | {"use_qk_norm": (None, False)},
    norm=("layer_norm_eps", 1e-5),
    tied=True,
    write=_written_cohere,
)
COHERE2 = replace(
    COHERE,
    architecture="Cohere2ForCausalLM",
    block=_cohere2_block,
    write=lambda spec: _written_cohere(spec) | written_types(spec),
    lacks=lambda config: layer_types_lack(config) or rope_lacks(config),
)


# Phi-3 and Phi-4: packed projections, LongRoPE, and in Phi-4-mini rotary positions of a part of each head.

LONGROPE = ("longrope", "su", "yarn")  # the first releases had other names for it


def _phi3_block(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    if rope_kind(rope_tree(fields.config)) in LONGROPE:
        original = fields.size("original_max_position_embeddings", default=4096)
        rope = read_longrope(fields, max_seq_len, original)
    else:
        rope = read_rope(fields, max_seq_len)
    rope = replace(rope, rotary_dim=rotary_dim(fields, read_head_dim(fields)))
    return {"rope": rope, "attention": one_window(fields)}


def _written_phi3(spec: ModelSpec) -> dict[str, Any]:
    rope = spec.block.rope
    original = {"original_max_position_embeddings": rope.original_max_seq_len} if rope.longrope else {}
    return {"sliding_window": spec.layer(0).window} | original


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    positions=4096,
    block=_phi3_block,
    off=SILU | {"resid_pdrop": (None, 0), "embd_pdrop": (None, 0)},
    norm=("rms_norm_eps", 1e-5),
    write=_written_phi3,
    lacks=partial(rope_lacks, partial=True, kinds=("default", *LONGROPE)),
    parts=lambda name, shape, spec: packed_parts(name, shape, spec, "qkv_proj", "gate_up_proj"),
)


# GLM-4: half of each head is rotated, in neighbouring pairs; gate and up are packed. `glm4` adds two norms.

SANDWICH_NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def half_rotated(fields: Fields, max_seq_len: int) -> Rope:
    return replace(read_rope(fields, max_seq_len), rotary_dim=rotary_dim(fields, read_head_dim(fields), default=0.5))


def _glm_block(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    rope = replace(half_rotated(fields, max_seq_len), interleaved=True)
    return {"qkv_bias": fields.boolean("attention_bias", default=True), "rope": rope}


def written_rotation(spec: ModelSpec) -> dict[str, Any]:
    return {"partial_rotary_factor": (spec.block.rope.rotary_dim or spec.head_dim) / spec.head_dim}


GLM = Family(
    architecture="GlmForCausalLM",
    positions=131_072,
    block=_glm_block,
    off=SILU,
    norm=("rms_norm_eps", 1.5625e-7),
    usual={"head_dim": 128, "num_key_value_heads": 2},
    write=lambda spec: written_bias(spec) | written_rotation(spec),
    lacks=partly_rotated_lacks,
    parts=lambda name, shape, spec: packed_parts(name, shape, spec, "gate_up_proj"),
)
GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    block=lambda fields, max_seq_len: _glm_block(fields, max_seq_len) | {"norm": NormSpec(placement="both")},
    parts=lambda name, shape, spec: packed_parts(
        ".".join(SANDWICH_NAMES.get(each, each) for each in name.split(".")), shape, spec, "gate_up_proj"
    ),
)


# Gemma 1, 2 and 3 (text).

TANH = "gelu_pytorch_tanh"
WRITTEN_GEMMA = {"hidden_act": TANH, "hidden_activation": TANH}
GEMMA_BLOCK: dict[str, Any] = {
    "norm": NormSpec(unit_offset=True),
    "ends": Ends(embedding_scale=0.0),
    "activation": "gelu_tanh",
}


def _sandwich_block(fields: Fields, period: int, *, logit_softcap: float, **own: Any) -> dict[str, Any]:
    """Return the block of Gemma 2 and 3, of whose layers every `period`-th has no window."""
    attention = AttentionSpec(
        scale=fields.size("query_pre_attn_scalar", default=256) ** -0.5,
        windows=read_periodic_windows(fields, period),
        **own,
    )
    return GEMMA_BLOCK | {
        "attention": attention,
        "norm": NormSpec(unit_offset=True, placement="both"),
        "ends": Ends(embedding_scale=0.0, logit_softcap=_cap(fields, "final_logit_softcapping", logit_softcap)),
    }


def _gemma3_block(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    """Return the block, whose layers with a window have positions of their own."""
    period = fields.size("sliding_window_pattern", default=6)
    tree = fields.config.get("rope_parameters") or {}
    scaling = tree.get("full_attention") or fields.config.get("rope_scaling") or {}
    theta = Fields(scaling, fields.where).number("rope_theta", default=fields.number("rope_theta", default=1_000_000.0))
    local = Fields(tree.get("sliding_attention") or {}, fields.where).number(
        "rope_theta", default=fields.number("rope_local_base_freq", default=10_000.0)
    )
    full = read_scaling(Fields(scaling, f"{fields.where} (rotary positions)"), theta, max_seq_len)
    own = _sandwich_block(fields, period, logit_softcap=0.0, local_rope=Rope(theta=local))
    return own | {"qk_norm": True, "rope": full}


def _written_gemma3(spec: ModelSpec) -> dict[str, Any]:
    local = spec.block.attention.local_rope or spec.block.rope
    own = {"rope_local_base_freq": local.theta, "rope_scaling": write_scaling(spec.block.rope)}
    return _written_sandwich(spec) | own


def _written_sandwich(spec: ModelSpec) -> dict[str, Any]:
    scale = spec.block.attention.scale  # transformers wants a whole number, whose inverse square root it is
    return WRITTEN_GEMMA | {
        "query_pre_attn_scalar": round(scale**-2) if scale else spec.head_dim,
        "final_logit_softcapping": spec.block.ends.logit_softcap or None,
        **written_types(spec),
    }


def _cap(fields: Fields, name: str, default: float) -> float:
    """Return a soft cap. An explicit null is none; a missing field is the default of transformers."""
    return 0.0 if fields.config.get(name, default) is None else fields.number(name, default=default)


def _activation_lacks(config: Mapping[str, Any]) -> str:
    # Gemma's first release says gelu and means the approximation by tanh.
    for name in ("hidden_activation", "hidden_act"):
        if config.get(name) not in (None, TANH, "gelu"):
            return f"{name} is {show(config[name])}"
    return ""


def _gemma3_lacks(config: Mapping[str, Any]) -> str:
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or not set(nested) <= {"full_attention", "sliding_attention"}:
        return f"rotary positions are {show(nested)}"
    local = nested.get("sliding_attention") or {}
    if not isinstance(local, Mapping) or rope_kind(local) != "default":
        return f"rotary positions of layers with a window are {show(local)}"
    full = {"rope_parameters": nested.get("full_attention") or {}, "rope_scaling": config.get("rope_scaling")}
    return _activation_lacks(config) or layer_types_lack(config) or rope_lacks(full)


GEMMA = Family(
    architecture="GemmaForCausalLM",
    positions=8192,
    block=lambda _, __: GEMMA_BLOCK,
    off=OFF | NO_BIAS | {"use_bidirectional_attention": (None, False)},
    usual={"head_dim": 256},
    tied=True,
    write=lambda _: WRITTEN_GEMMA,
    lacks=lambda config: _activation_lacks(config) or layer_types_lack(config) or rope_lacks(config),
)
GEMMA2 = replace(
    GEMMA,
    architecture="Gemma2ForCausalLM",
    block=lambda fields, _: _sandwich_block(
        fields, 2, logit_softcap=30.0, softcap=_cap(fields, "attn_logit_softcapping", 50.0)
    ),
    write=lambda spec: _written_sandwich(spec) | {"attn_logit_softcapping": spec.block.attention.softcap or None},
)
GEMMA3_TEXT = replace(
    GEMMA,
    architecture="Gemma3ForCausalLM",
    positions=131_072,
    block=_gemma3_block,
    off={**GEMMA.off, "attn_logit_softcapping": (None,)},
    write=_written_gemma3,
    lacks=_gemma3_lacks,
)
