"""Gemma 1, 2 and 3 (text)."""

from collections.abc import Mapping
from typing import Any

from trimaran.models.config_fields import Fields, show
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, read_decoder
from trimaran.models.families.layer_kinds import every_nth_full, layer_types_lack, read_windows, written_types
from trimaran.models.families.rope_fields import (
    read_rope,
    read_scaling,
    rope_kind,
    rope_lacks,
    write_scaling,
)
from trimaran.models.layer_variations import AttentionSpec, Ends, NormSpec, Rope
from trimaran.models.spec import Block, ModelSpec
from trimaran.models.validate_spec import MOST_LAYERS

_TANH = "gelu_pytorch_tanh"
_OFF = OFF | {"attention_bias": (None, False), "use_bidirectional_attention": (None, False)}
_SIZES = {"head_dim": 256}


def _read_gemma(fields: Fields) -> ModelSpec:
    fields, max_seq_len = fields.assuming(_SIZES), fields.integer("max_position_embeddings", default=8192)
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=read_rope(fields, max_seq_len),
        norm=NormSpec(unit_offset=True),
        ends=Ends(embedding_scale=0.0),
        activation="gelu_tanh",
    )
    return read_decoder(fields, block, max_seq_len=max_seq_len, tied=True)


def _read_gemma2(fields: Fields) -> ModelSpec:
    fields, max_seq_len = fields.assuming(_SIZES), fields.integer("max_position_embeddings", default=8192)
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    attention = AttentionSpec(
        scale=fields.size("query_pre_attn_scalar", default=256) ** -0.5,
        softcap=_cap(fields, "attn_logit_softcapping", 50.0),
        windows=read_windows(fields, fields.size("sliding_window", default=4096), every_nth_full(layers, 2)),
    )
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=read_rope(fields, max_seq_len),
        attention=attention,
        norm=NormSpec(unit_offset=True, placement="both"),
        ends=Ends(embedding_scale=0.0, logit_softcap=_cap(fields, "final_logit_softcapping", 30.0)),
        activation="gelu_tanh",
    )
    return read_decoder(fields, block, max_seq_len=max_seq_len, tied=True)


def _read_gemma3(fields: Fields) -> ModelSpec:
    fields, max_seq_len = fields.assuming(_SIZES), fields.integer("max_position_embeddings", default=131_072)
    layers, period = (
        fields.size("num_hidden_layers", most=MOST_LAYERS),
        fields.size("sliding_window_pattern", default=6),
    )
    rope, local = _gemma3_ropes(fields, max_seq_len)
    window = fields.size("sliding_window", default=4096)
    attention = AttentionSpec(
        scale=fields.size("query_pre_attn_scalar", default=256) ** -0.5,
        windows=read_windows(fields, window, every_nth_full(layers, period)),
        local_rope=local,
    )
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        qk_norm=True,
        rope=rope,
        attention=attention,
        norm=NormSpec(unit_offset=True, placement="both"),
        ends=Ends(embedding_scale=0.0, logit_softcap=_cap(fields, "final_logit_softcapping", 0.0)),
        activation="gelu_tanh",
    )
    return read_decoder(fields, block, max_seq_len=max_seq_len, tied=True)


def _gemma3_ropes(fields: Fields, max_seq_len: int) -> tuple[Rope, Rope]:
    """Return the positions of the layers without a window and of those with one."""
    tree = fields.config.get("rope_parameters") or {}
    scaling = tree.get("full_attention") or fields.config.get("rope_scaling") or {}
    theta = Fields(scaling, fields.where).number("rope_theta", default=fields.number("rope_theta", default=1_000_000.0))
    local = Fields(tree.get("sliding_attention") or {}, fields.where).number(
        "rope_theta", default=fields.number("rope_local_base_freq", default=10_000.0)
    )
    full = read_scaling(Fields(scaling, f"{fields.where} (rotary positions)"), theta, max_seq_len)
    return full, Rope(theta=local)


def _write_gemma(spec: ModelSpec) -> dict[str, Any]:
    return {"hidden_act": _TANH, "hidden_activation": _TANH}


def _write_gemma2(spec: ModelSpec) -> dict[str, Any]:
    attention, ends = spec.block.attention, spec.block.ends
    own = {
        "query_pre_attn_scalar": _scalar(spec),
        "attn_logit_softcapping": attention.softcap or None,
        "final_logit_softcapping": ends.logit_softcap or None,
    }
    return _write_gemma(spec) | own | written_types(spec)


def _write_gemma3(spec: ModelSpec) -> dict[str, Any]:
    local = spec.block.attention.local_rope or spec.block.rope
    own = {
        "query_pre_attn_scalar": _scalar(spec),
        "final_logit_softcapping": spec.block.ends.logit_softcap or None,
        "rope_local_base_freq": local.theta,
        "rope_scaling": write_scaling(spec.block.rope),
    }
    return _write_gemma(spec) | own | written_types(spec)


def _scalar(spec: ModelSpec) -> int:
    """Return the number whose inverse square root scales the scores; transformers wants a whole one."""
    scale = spec.block.attention.scale
    return round(scale**-2) if scale else spec.head_dim


def _cap(fields: Fields, name: str, default: float) -> float:
    """Return a soft cap. An explicit null is none; a missing field is the default of transformers."""
    if fields.config.get(name, default) is None:
        return 0.0
    return fields.number(name, default=default)


def _activation_lacks(config: Mapping[str, Any]) -> str:
    # Gemma's first release says gelu and means the approximation by tanh.
    for name in ("hidden_activation", "hidden_act"):
        if config.get(name) not in (None, _TANH, "gelu"):
            return f"{name} is {show(config[name])}"
    return ""


def _gemma_lacks(config: Mapping[str, Any]) -> str:
    return _activation_lacks(config) or layer_types_lack(config) or rope_lacks(config)


def _gemma3_lacks(config: Mapping[str, Any]) -> str:
    tree = config.get("rope_parameters") or {}
    if not isinstance(tree, Mapping):
        return f"rotary positions are {show(tree)}"
    nested = tree
    for kind in nested:
        if kind not in ("full_attention", "sliding_attention"):
            return f"rotary positions are {show(tree)}"
    local = nested.get("sliding_attention") or {}
    if not isinstance(local, Mapping) or rope_kind(local) != "default":
        return f"rotary positions of layers with a window are {show(local)}"
    full = {"rope_parameters": nested.get("full_attention") or {}, "rope_scaling": config.get("rope_scaling")}
    return _activation_lacks(config) or layer_types_lack(config) or rope_lacks(full)


GEMMA = Family(architecture="GemmaForCausalLM", read=_read_gemma, write=_write_gemma, off=_OFF, lacks=_gemma_lacks)
GEMMA2 = Family(architecture="Gemma2ForCausalLM", read=_read_gemma2, write=_write_gemma2, off=_OFF, lacks=_gemma_lacks)
GEMMA3_TEXT = Family(
    architecture="Gemma3ForCausalLM",
    read=_read_gemma3,
    write=_write_gemma3,
    off=_OFF | {"attn_logit_softcapping": (None,)},
    lacks=_gemma3_lacks,
)
