"""GLM-4: half of each head is rotated, in neighbouring pairs; gate and up are packed. `glm4` adds two norms."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimaran.models.config_fields import Fields
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, read_decoder, read_head_dim
from trimaran.models.families.disk_parts import DiskPart, Shape, packed_feed_forward, plain_parts
from trimaran.models.families.rope_fields import read_rope, rope_lacks, rotary_dim
from trimaran.models.layer_variations import NormSpec
from trimaran.models.spec import Block, ModelSpec

_OFF = OFF | {"hidden_act": (None, "silu")}
_SIZES = {"head_dim": 128, "num_key_value_heads": 2}
_SANDWICH_NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def _read(fields: Fields) -> ModelSpec:
    fields, max_seq_len = fields.assuming(_SIZES), fields.integer("max_position_embeddings", default=131_072)
    width = rotary_dim(fields, read_head_dim(fields), default=0.5)
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1.5625e-7),
        qkv_bias=fields.boolean("attention_bias", default=True),
        rope=replace(read_rope(fields, max_seq_len), rotary_dim=width, interleaved=True),
    )
    return read_decoder(fields, block, max_seq_len=max_seq_len)


def _read_glm4(fields: Fields) -> ModelSpec:
    spec = _read(fields)
    return replace(spec, block=replace(spec.block, norm=NormSpec(placement="both")))


def _write(spec: ModelSpec) -> dict[str, Any]:
    rotated = spec.block.rope.rotary_dim or spec.head_dim
    return {"attention_bias": spec.block.qkv_bias, "partial_rotary_factor": rotated / spec.head_dim}


def _lacks(config: Mapping[str, Any]) -> str:
    return rope_lacks(config, partial=True)


def _glm_parts(name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    return packed_feed_forward(name, shape) or plain_parts(name, shape, spec)


def _glm4_parts(name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    parts = name.split(".")
    renamed = ".".join(_SANDWICH_NAMES.get(each, each) for each in parts)
    return _glm_parts(renamed, shape, spec)


GLM = Family(architecture="GlmForCausalLM", read=_read, write=_write, off=_OFF, lacks=_lacks, parts=_glm_parts)
GLM4 = Family(architecture="Glm4ForCausalLM", read=_read_glm4, write=_write, off=_OFF, lacks=_lacks, parts=_glm4_parts)
