"""GLM-4.5: grouped attention with partial rotary positions, and DeepSeek-V3's experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimaran.models.config_fields import Fields
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, read_decoder, read_head_dim
from trimaran.models.families.deepseek import NAMES
from trimaran.models.families.disk_parts import DiskPart, Shape, plain_parts, renamed
from trimaran.models.families.expert_fields import read_corrected_router, read_shared_experts, write_shared_experts
from trimaran.models.families.rope_fields import read_rope, rope_lacks, rotary_dim
from trimaran.models.spec import Block, ModelSpec

_OFF = OFF | {"hidden_act": (None, "silu")}


def _read(fields: Fields) -> ModelSpec:
    max_seq_len = fields.integer("max_position_embeddings", default=131_072)
    normalize = fields.boolean("norm_topk_prob", default=True)
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
        qkv_bias=fields.boolean("attention_bias", default=False),
        qk_norm=fields.boolean("use_qk_norm", default=False),
        rope=replace(read_rope(fields, max_seq_len), rotary_dim=rotary_dim(fields, read_head_dim(fields), default=0.5)),
        experts=read_shared_experts(fields, read_corrected_router(fields), balance=0.0001, normalize=normalize),
    )
    return read_decoder(fields, block, max_seq_len=max_seq_len)


def _write(spec: ModelSpec) -> dict[str, Any]:
    if (experts := spec.block.experts) is None:
        return {}
    return write_shared_experts(experts) | {
        "attention_bias": spec.block.qkv_bias,
        "use_qk_norm": spec.block.qk_norm,
        "partial_rotary_factor": (spec.block.rope.rotary_dim or spec.head_dim) / spec.head_dim,
        "num_nextn_predict_layers": spec.prediction_layers,
    }


def _lacks(config: Mapping[str, Any]) -> str:
    return rope_lacks(config, partial=True)


def _parts(name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    return renamed(plain_parts(name, shape, spec), NAMES)


GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM", read=_read, write=_write, off=_OFF, lacks=_lacks, parts=_parts, extra_layers=True
)
