"""Llama 2 and 3, and Mistral, which may add a window."""

from collections.abc import Mapping
from typing import Any

from trimaran.models.config_fields import Fields, show
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, read_decoder
from trimaran.models.families.rope_fields import read_rope, rope_lacks
from trimaran.models.layer_variations import AttentionSpec
from trimaran.models.spec import Block, ModelSpec

_OFF = OFF | {"hidden_act": (None, "silu"), "mlp_bias": (None, False)}


def _read_llama(fields: Fields) -> ModelSpec:
    max_seq_len = fields.integer("max_position_embeddings", default=2048)
    biased = fields.boolean("attention_bias", default=False)
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        qkv_bias=biased,
        rope=read_rope(fields, max_seq_len),
        attention=AttentionSpec(out_bias=biased),
    )
    return read_decoder(fields, block, max_seq_len=max_seq_len)


def _write_llama(spec: ModelSpec) -> dict[str, Any]:
    return {"attention_bias": spec.block.qkv_bias} if spec.block.qkv_bias else {}


def _llama_lacks(config: Mapping[str, Any]) -> str:
    types = config.get("layer_types") or []
    if not isinstance(types, list) or any(each != "full_attention" for each in types):
        return f"layer_types is {show(types)}"
    return rope_lacks(config)


def _read_mistral(fields: Fields) -> ModelSpec:
    max_seq_len = fields.integer("max_position_embeddings", default=131_072)
    window = 0  # an explicit null is no window; a missing field is the default of transformers
    if fields.config.get("sliding_window", 4096) is not None:
        window = fields.size("sliding_window", default=4096)
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=read_rope(fields, max_seq_len),
        attention=AttentionSpec(windows=(window,) if window else ()),
    )
    return read_decoder(fields, block, max_seq_len=max_seq_len)


def _write_mistral(spec: ModelSpec) -> dict[str, Any]:
    return {"sliding_window": spec.layer(0).window}


LLAMA = Family(architecture="LlamaForCausalLM", read=_read_llama, write=_write_llama, off=_OFF, lacks=_llama_lacks)
MISTRAL = Family(
    architecture="MistralForCausalLM",
    read=_read_mistral,
    write=_write_mistral,
    off=_OFF | {"attention_bias": (None, False), "layer_types": (None, [])},
    lacks=rope_lacks,
)
