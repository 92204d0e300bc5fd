"""OLMo-2: norms after attention and feed-forward, and norms of queries and keys over all heads together."""

from typing import Any

from trimaran.models.config_fields import Fields
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, read_decoder
from trimaran.models.families.rope_fields import read_rope, rope_lacks
from trimaran.models.layer_variations import AttentionSpec, NormSpec
from trimaran.models.spec import Block, ModelSpec


def _read(fields: Fields) -> ModelSpec:
    max_seq_len = fields.integer("max_position_embeddings", default=2048)
    biased = fields.boolean("attention_bias", default=False)
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
        qkv_bias=biased,
        qk_norm=True,
        rope=read_rope(fields, max_seq_len),
        attention=AttentionSpec(out_bias=biased, wide_qk_norm=True),
        norm=NormSpec(placement="after"),
    )
    return read_decoder(fields, block, max_seq_len=max_seq_len)


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {"attention_bias": spec.block.qkv_bias}


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    read=_read,
    write=_write,
    off=OFF | {"hidden_act": (None, "silu")},
    lacks=rope_lacks,
)
