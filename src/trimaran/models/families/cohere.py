"""Cohere's Command R and R7B: LayerNorm, attention and feed-forward in parallel, scaled logits, interleaved pairs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimaran.models.config_fields import Fields
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, read_decoder
from trimaran.models.families.layer_kinds import every_nth_full, layer_types_lack, read_windows, written_types
from trimaran.models.families.rope_fields import read_rope, rope_lacks
from trimaran.models.layer_variations import AttentionSpec, Ends, NormSpec
from trimaran.models.spec import Block, ModelSpec
from trimaran.models.validate_spec import MOST_LAYERS

# Command R+ has norms of queries and keys with weights of their own for each head.
_OFF = OFF | {"hidden_act": (None, "silu"), "use_qk_norm": (None, False)}


def _read(fields: Fields) -> ModelSpec:
    # Command R's config.json has 8,192 positions, but says that the model was trained with model_max_length of them.
    positions = fields.integer("max_position_embeddings", default=8192)
    max_seq_len = max(positions, fields.integer("model_max_length", default=0))
    biased = fields.boolean("attention_bias", default=False)
    block = Block(
        norm_eps=fields.number("layer_norm_eps", default=1e-5),
        qkv_bias=biased,
        rope=replace(read_rope(fields, max_seq_len), interleaved=True),
        attention=AttentionSpec(out_bias=biased),
        norm=NormSpec(kind="layer", parallel=True),
        ends=Ends(logit_scale=fields.number("logit_scale", default=0.0625)),
    )
    return read_decoder(fields, block, max_seq_len=max_seq_len, tied=True)


def _read_cohere2(fields: Fields) -> ModelSpec:
    """Return the spec of Cohere 2, whose layers without a window have no rotary positions."""
    spec, layers = _read(fields), fields.size("num_hidden_layers", most=MOST_LAYERS)
    period = fields.size("sliding_window_pattern", default=4)
    windows = read_windows(fields, fields.size("sliding_window", default=4096), every_nth_full(layers, period))
    rotated = tuple(window > 0 for window in windows or (0,))
    attention = replace(spec.block.attention, windows=windows, rope_layers=() if all(rotated) else rotated)
    return replace(spec, block=replace(spec.block, attention=attention))


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {
        "layer_norm_eps": spec.block.norm_eps,
        "logit_scale": spec.block.ends.logit_scale,
        "attention_bias": spec.block.qkv_bias,
    }


def _write_cohere2(spec: ModelSpec) -> dict[str, Any]:
    return _write(spec) | written_types(spec)


def _lacks(config: Mapping[str, Any]) -> str:
    return layer_types_lack(config) or rope_lacks(config)


COHERE = Family(architecture="CohereForCausalLM", read=_read, write=_write, off=_OFF, lacks=rope_lacks)
COHERE2 = Family(architecture="Cohere2ForCausalLM", read=_read_cohere2, write=_write_cohere2, off=_OFF, lacks=_lacks)
