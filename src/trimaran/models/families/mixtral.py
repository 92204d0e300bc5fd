"""Mixtral: Mistral with experts in every layer."""

from collections.abc import Mapping
from typing import Any

from trimaran.models.config_fields import Fields
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, read_decoder
from trimaran.models.families.disk_parts import DiskPart, Shape, plain_parts, renamed
from trimaran.models.families.expert_fields import read_losses, write_losses
from trimaran.models.families.rope_fields import read_rope, rope_lacks
from trimaran.models.layer_variations import AttentionSpec
from trimaran.models.spec import Block, ExpertSpec, ModelSpec

_OFF = OFF | {"hidden_act": (None, "silu"), "router_jitter_noise": (None, 0)}
# The weights of a block have other names on disk, and so have those of an expert.
_NAMES = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}


def _read(fields: Fields) -> ModelSpec:
    max_seq_len = fields.integer("max_position_embeddings", default=4096 * 32)
    window = fields.integer("sliding_window", default=0)
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
        rope=read_rope(fields, max_seq_len),
        attention=AttentionSpec(windows=(window,) if window else ()),
        experts=ExpertSpec(
            num_experts=fields.integer("num_local_experts", default=8),
            top_k=fields.integer("num_experts_per_tok", default=2),
            ffn=fields.integer("intermediate_size"),
            **read_losses(fields, balance=0.001),
        ),
    )
    return read_decoder(fields, block, max_seq_len=max_seq_len)


def _write(spec: ModelSpec) -> dict[str, Any]:
    experts, windows = spec.block.experts, spec.block.attention.windows
    if experts is None:
        return {}
    return write_losses(experts) | {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "intermediate_size": experts.ffn,
        "sliding_window": windows[0] if windows else None,
    }


def _lacks(config: Mapping[str, Any]) -> str:
    return rope_lacks(config)


def _parts(name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    return renamed(plain_parts(name, shape, spec), _NAMES)


MIXTRAL = Family(architecture="MixtralForCausalLM", read=_read, write=_write, off=_OFF, lacks=_lacks, parts=_parts)
