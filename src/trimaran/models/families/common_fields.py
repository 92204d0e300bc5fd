"""The fields of config.json that all architectures have in common, read and written."""

from dataclasses import fields as fields_of
from typing import Any

from trimaran.models.config_fields import Fields, bad_field
from trimaran.models.families.rope_fields import write_rope
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


def read_decoder(fields: Fields, block: Block, *, max_seq_len: int, tied: bool = False) -> ModelSpec:
    """Return the spec with this block; `tied` is what the architecture does if config.json does not say."""
    heads = fields.integer("num_attention_heads")
    kind = fields.word("model_type", default="")
    return ModelSpec(
        name=kind,
        family=kind,
        layers=fields.integer("num_hidden_layers"),
        hidden=fields.integer("hidden_size"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", default=heads),
        head_dim=read_head_dim(fields),
        ffn=fields.integer("intermediate_size", default=0 if block.experts else None),
        vocab=fields.integer("vocab_size"),
        max_seq_len=max_seq_len,
        tied=fields.boolean("tie_word_embeddings", default=tied),
        block=block,
    )


def write_decoder(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields that all architectures have. The ids of special tokens belong to the tokenizer."""
    config: dict[str, Any] = {HF_NAMES[each.name]: getattr(spec, each.name) for each in fields_of(spec)
                              if each.name in HF_NAMES}  # fmt: skip
    return (
        config
        | {
            "head_dim": spec.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": spec.block.norm_eps,
            "tie_word_embeddings": spec.tied,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        | write_rope(spec.block.rope, spec.head_dim)
    )


def read_head_dim(fields: Fields) -> int:
    """Return the width of a head, which is the hidden size divided by the heads if config.json does not say."""
    if width := fields.integer("head_dim", default=0):
        return width
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if heads < 1 or hidden % heads:
        raise bad_field("num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}", fields.where)
    return hidden // heads
