"""DeepSeek-V2 and V3, and Kimi-K2, which is a DeepSeek-V3: latent attention, groups of experts, shared experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimaran.models.config_fields import Fields, show
from trimaran.models.families.architecture import Family
from trimaran.models.families.common_fields import OFF, read_decoder
from trimaran.models.families.disk_parts import DiskPart, Shape, plain_parts, renamed
from trimaran.models.families.expert_fields import read_corrected_router, read_shared_experts, write_shared_experts
from trimaran.models.families.rope_fields import read_rope, rope_lacks
from trimaran.models.layer_variations import AttentionSpec, LatentSpec, RouterSpec
from trimaran.models.spec import Block, ModelSpec

_OFF = OFF | {"hidden_act": (None, "silu"), "moe_layer_freq": (None, 1), "mlp_bias": (None, False)}
_V3_OFF = _OFF | {"scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")}
_V2_OFF = _OFF | {
    "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy", "group_limited_greedy"),
    "norm_topk_prob": (None, False),  # transformers ignores it in this architecture, and DeepSeek's own code does not
}
# On disk the shared experts have the plural, and the correction belongs to the gate.
NAMES = {".mlp.shared_expert.": ".mlp.shared_experts.", ".mlp.correction_bias": ".mlp.gate.e_score_correction_bias"}


def _read_v3(fields: Fields) -> ModelSpec:
    normalize = fields.boolean("norm_topk_prob", default=True)
    experts = read_shared_experts(fields, read_corrected_router(fields), balance=0.0001, normalize=normalize)
    interleaved = fields.boolean("rope_interleave", default=True)
    return _read(fields, Block(experts=experts), max_seq_len=4096, interleaved=interleaved)


def _read_kimi(fields: Fields) -> ModelSpec:
    return replace(_read_v3(fields), family="deepseek_v3")  # as which transformers loads it


def _read_v2(fields: Fields) -> ModelSpec:
    grouped = fields.word("topk_method", default="greedy") == "group_limited_greedy"
    router = RouterSpec(
        groups=fields.integer("n_group", default=1) if grouped else 1,
        top_groups=fields.integer("topk_group", default=1) if grouped else 1,
        scale=fields.number("routed_scaling_factor", default=1.0),
    )
    experts = read_shared_experts(fields, router, balance=0.001, normalize=False)
    return _read(fields, Block(experts=experts), max_seq_len=2048, interleaved=True)


def _read(fields: Fields, block: Block, *, max_seq_len: int, interleaved: bool) -> ModelSpec:
    max_seq_len = fields.integer("max_position_embeddings", default=max_seq_len)
    latent = LatentSpec(
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        query_rank=fields.integer("q_lora_rank", default=0),
        bias=fields.boolean("attention_bias", default=False),
    )
    block = replace(
        block,
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=replace(read_rope(fields, max_seq_len), interleaved=interleaved, rotary_dim=latent.rope_dim),
        attention=AttentionSpec(latent=latent),
    )
    spec = read_decoder(fields, block, max_seq_len=max_seq_len)
    return replace(spec, head_dim=latent.head_dim, kv_heads=spec.heads)


def _write_v3(spec: ModelSpec) -> dict[str, Any]:
    return _write(spec) | {
        "rope_interleave": spec.block.rope.interleaved,
        "num_nextn_predict_layers": spec.prediction_layers,
    }


def _write_v2(spec: ModelSpec) -> dict[str, Any]:
    grouped = spec.block.experts is not None and spec.block.experts.router.groups > 1
    return _write(spec) | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _write(spec: ModelSpec) -> dict[str, Any]:
    experts, latent = spec.block.experts, spec.block.attention.latent
    if experts is None or latent is None:
        return {}
    return write_shared_experts(experts) | {
        "head_dim": latent.rope_dim,  # as transformers writes it: all of these features are rotated
        "partial_rotary_factor": 1.0,
        "num_key_value_heads": spec.heads,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.query_rank or None,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "attention_bias": latent.bias,
        "moe_layer_freq": 1,
    }


def _lacks(config: Mapping[str, Any]) -> str:
    kv_heads = config.get("num_key_value_heads")
    if kv_heads not in (None, config.get("num_attention_heads")):
        return f"num_key_value_heads is {show(kv_heads)}, and latent attention has a key for each head"
    return rope_lacks(config)


def _parts(name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    return renamed(plain_parts(name, shape, spec), NAMES)


DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    read=_read_v3,
    write=_write_v3,
    off=_V3_OFF,
    lacks=_lacks,
    parts=_parts,
    extra_layers=True,
)
KIMI_K2 = replace(DEEPSEEK_V3, read=_read_kimi)
DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM", read=_read_v2, write=_write_v2, off=_V2_OFF, lacks=_lacks, parts=_parts
)
