"""The fields of config.json that all architectures have in common, read and written."""

from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Any

from trimaran.models.config_fields import Fields, bad_field, show
from trimaran.models.rope import Rope
from trimaran.models.spec import Block, ModelSpec

HF_NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope.theta": "rope_theta",
    "rope.original_max_seq_len": "rope.original_max_position_embeddings",
    "experts.num_experts": "num_experts",
    "experts.top_k": "num_experts_per_tok",
    "experts.ffn": "moe_intermediate_size",
    "experts.shared_ffn": "shared_expert_intermediate_size",
    "experts.balance": "router_aux_loss_coef",
    "experts.z_loss": "router_z_loss_coef",
    "experts.capacity": "expert_capacity_factor",
}

# Features that our decoder lacks in every architecture, with the values that switch them off.
OFF: dict[str, tuple[Any, ...]] = {"attention_dropout": (None, 0), "quantization_config": (None,)}
ROPE_KINDS = ("default", "llama3")


def read_decoder(fields: Fields, block: Block, *, max_seq_len: int, tied: bool = False) -> ModelSpec:
    """Return the spec with this block; `tied` is what the architecture does if config.json does not say."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kind = fields.word("model_type", default="")
    return ModelSpec(
        name=kind,
        family=kind,
        layers=fields.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", default=heads),
        head_dim=fields.integer("head_dim", default=0) or _head_dim(hidden, heads, fields.where),
        ffn=fields.integer("intermediate_size", default=0 if block.experts else None),
        vocab=fields.integer("vocab_size"),
        max_seq_len=max_seq_len,
        tied=fields.boolean("tie_word_embeddings", default=tied),
        block=block,
    )


def write_decoder(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields that all architectures have. The ids of special tokens belong to the tokenizer."""
    rope = spec.block.rope
    config: dict[str, Any] = {HF_NAMES[each.name]: getattr(spec, each.name) for each in fields_of(spec)
                              if each.name in HF_NAMES}  # fmt: skip
    return config | {
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.block.norm_eps,
        "tie_word_embeddings": spec.tied,
        "rope_theta": rope.theta,
        "rope_scaling": write_scaling(rope),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def write_scaling(rope: Rope) -> dict[str, Any] | None:
    """Return `rope_scaling` as transformers 4 has it and 5 still reads it; None without scaling."""
    if rope.factor == 1:
        return None
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_seq_len,
    }


def read_rope(fields: Fields, max_seq_len: int) -> Rope:
    """Return the rotary positions that a config.json describes."""
    tree = rope_tree(fields.config)
    theta = Fields({**fields.config, **tree}, fields.where).number("rope_theta", default=10_000.0)
    if rope_kind(tree) == "default":
        return Rope(theta=theta)
    scaling = Fields(tree, f"{fields.where} (rotary positions)")
    return Rope(
        theta=theta,
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_seq_len=scaling.integer("original_max_position_embeddings", default=max_seq_len),
    )


def rope_lacks(config: Mapping[str, Any]) -> str:
    """Return what the decoder lacks of a config's rotary positions; an empty string if nothing."""
    rope = rope_tree(config)
    if not isinstance(rope, Mapping) or any(isinstance(each, Mapping) for each in rope.values()):
        return f"rotary positions are {show(rope)}"
    for tree in (config, rope):
        if tree.get("partial_rotary_factor") not in (None, 1):
            return f"partial_rotary_factor is {show(tree['partial_rotary_factor'])}"
    if (kind := rope_kind(rope)) not in ROPE_KINDS:
        return f"rope_type is {show(kind)}"
    return ""


def full_attention_only(config: Mapping[str, Any]) -> str:
    """Return the layer types if some of them are not full attention; an empty string if all are."""
    types = config.get("layer_types") or []
    if not isinstance(types, list) or any(each != "full_attention" for each in types):
        return f"layer_types is {show(types)}"
    return ""


def rope_tree(config: Mapping[str, Any]) -> Any:
    """Return the rotary settings from where transformers 5 writes them, or from where 4 does."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def rope_kind(tree: Mapping[str, Any]) -> Any:
    return tree.get("rope_type") or tree.get("type") or "default"


def _head_dim(hidden: int, heads: int, where: str) -> int:
    if heads < 1 or hidden % heads:
        raise bad_field("num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}", where)
    return hidden // heads
