"""GLM-4.5: grouped attention with partial rotary positions, and DeepSeek-V3's experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimaran.models.config_fields import Fields
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, read_decoder, read_rope, rope_lacks, rope_tree
from trimaran.models.families.deepseek import NAMES
from trimaran.models.families.disk_parts import DiskPart, Shape, plain_parts, renamed
from trimaran.models.families.expert_fields import read_corrected_router, read_shared_experts, write_shared_experts
from trimaran.models.spec import Block, ModelSpec

_OFF = OFF | {"hidden_act": (None, "silu")}
USUAL_ROTARY_FACTOR = 0.5


def _read(fields: Fields) -> ModelSpec:
    max_seq_len = fields.integer("max_position_embeddings", default=131_072)
    normalize = fields.boolean("norm_topk_prob", default=True)
    block = Block(
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
        qkv_bias=fields.boolean("attention_bias", default=False),
        qk_norm=fields.boolean("use_qk_norm", default=False),
        rope=read_rope(_without_part(fields), max_seq_len),
        experts=read_shared_experts(fields, read_corrected_router(fields), balance=0.0001, normalize=normalize),
    )
    spec = read_decoder(fields, block, max_seq_len=max_seq_len)
    rotary_dim = int(spec.head_dim * _rotary_factor(fields))
    rope = replace(block.rope, rotary_dim=rotary_dim if rotary_dim < spec.head_dim else 0)
    return replace(spec, block=replace(block, rope=rope))


def _rotary_factor(fields: Fields) -> float:
    tree = {**fields.config, **rope_tree(fields.config)}
    return Fields(tree, fields.where).number("partial_rotary_factor", default=USUAL_ROTARY_FACTOR)


def _without_part(fields: Fields) -> Fields:
    return replace(fields, config=_no_part(fields.config))


def _no_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without the partial rotary factor, which this module reads itself."""
    key = "partial_rotary_factor"
    plain = {name: value for name, value in config.items() if name != key}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(tree := plain.get(name), Mapping):
            plain[name] = {each: value for each, value in tree.items() if each != key}
    return plain


def _write(spec: ModelSpec) -> dict[str, Any]:
    if (experts := spec.block.experts) is None:
        return {}
    return write_shared_experts(experts) | {
        "attention_bias": spec.block.qkv_bias,
        "use_qk_norm": spec.block.qk_norm,
        "partial_rotary_factor": (spec.block.rope.rotary_dim or spec.head_dim) / spec.head_dim,
        "num_nextn_predict_layers": 0,
    }


def _lacks(config: Mapping[str, Any]) -> str:
    return rope_lacks(_no_part(config))


def _parts(name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    return renamed(plain_parts(name, shape, spec), NAMES)


GLM4_MOE = Family(architecture="Glm4MoeForCausalLM", read=_read, write=_write, off=_OFF, lacks=_lacks, parts=_parts)
