"""Phi-3 and Phi-4: packed projections, LongRoPE, and in Phi-4-mini rotary positions of a part of each head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimaran.models.config_fields import Fields
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, read_decoder, read_head_dim
from trimaran.models.families.disk_parts import DiskPart, Shape, packed_feed_forward, packed_heads, plain_parts
from trimaran.models.families.rope_fields import read_longrope, read_rope, rope_kind, rope_lacks, rope_tree, rotary_dim
from trimaran.models.layer_variations import AttentionSpec
from trimaran.models.spec import Block, ModelSpec

# The first releases had other names for LongRoPE.
_LONGROPE = ("longrope", "su", "yarn")
_OFF = OFF | {"hidden_act": (None, "silu"), "resid_pdrop": (None, 0), "embd_pdrop": (None, 0)}


def _read(fields: Fields) -> ModelSpec:
    max_seq_len = fields.integer("max_position_embeddings", default=4096)
    if rope_kind(rope_tree(fields.config)) in _LONGROPE:
        original = fields.size("original_max_position_embeddings", default=4096)
        rope = read_longrope(fields, max_seq_len, original)
    else:
        rope = read_rope(fields, max_seq_len)
    window = fields.integer("sliding_window", default=0)
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
        rope=replace(rope, rotary_dim=rotary_dim(fields, read_head_dim(fields))),
        attention=AttentionSpec(windows=(window,) if window else ()),
    )
    return read_decoder(fields, block, max_seq_len=max_seq_len)


def _write(spec: ModelSpec) -> dict[str, Any]:
    rope = spec.block.rope
    original = {"original_max_position_embeddings": rope.original_max_seq_len} if rope.longrope else {}
    return {"sliding_window": spec.layer(0).window} | original


def _lacks(config: Mapping[str, Any]) -> str:
    return rope_lacks(config, partial=True, kinds=("default", *_LONGROPE))


def _parts(name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    return packed_heads(name, shape, spec) or packed_feed_forward(name, shape) or plain_parts(name, shape, spec)


PHI3 = Family(architecture="Phi3ForCausalLM", read=_read, write=_write, off=_OFF, lacks=_lacks, parts=_parts)
