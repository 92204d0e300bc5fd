"""Llama 2 and 3."""

from collections.abc import Mapping
from typing import Any

from trimaran.models.config_fields import Fields
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, full_attention_only, read_decoder, read_rope, rope_lacks
from trimaran.models.spec import Block, ModelSpec

_OFF = OFF | {"hidden_act": (None, "silu"), "mlp_bias": (None, False), "attention_bias": (None, False),
              "use_sliding_window": (None, False)}  # fmt: skip


def _read(fields: Fields) -> ModelSpec:
    max_seq_len = fields.integer("max_position_embeddings", default=2048)
    block = Block(norm_eps=fields.number("rms_norm_eps", default=1e-6), rope=read_rope(fields, max_seq_len))
    return read_decoder(fields, block, max_seq_len=max_seq_len)


def _lacks(config: Mapping[str, Any]) -> str:
    return full_attention_only(config) or rope_lacks(config)


LLAMA = Family(architecture="LlamaForCausalLM", read=_read, write=lambda _: {}, off=_OFF, lacks=_lacks)
