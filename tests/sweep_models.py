"""Tiny configurations of every architecture that transformers calls a causal language model, for `tests/sweep.py`."""

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

HEADS = 4
# Fields of many architectures, and their small values. A configuration gets only its own fields.
TINY: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size", "vocab_size_per_layer_input"), 320),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "embed_dim", "emb_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "hidden_dim", "lru_width"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "linear_num_key_heads", "linear_num_value_heads"), HEADS),
    "num_key_value_heads": 2,
    "mamba_chunk_size": 8,
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_ff", "dff"), 48
    ),
    **dict.fromkeys(("inner_dim", "ffn_hidden_size", "feed_forward_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("block_ff_dim", "dense_intermediate_size", "mlp_hidden_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 64),
    **dict.fromkeys(("max_source_positions", "context_length", "model_max_length"), 64),
    **dict.fromkeys(("head_dim", "attention_head_size", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("head_size", "global_head_dim", "linear_head_dim", "kv_channels", "v_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_dim", "moe_ffn_hidden_size"), 16),
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "rotary_dim"), 4),
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sep_token_id": 2,
    "cls_token_id": 1,
    "use_cache": False,
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), 0),
    "is_decoder": True,
    "causal": True,  # encoders that may also be decoders
}
MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
FOUR: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2, "attention_head_dim": 16}
# What single architectures need besides.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 4,
        "hidden_size_per_layer_input": 8,
    },
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
        "window_size": 8,
    },
    "granitemoehybrid": MAMBA2 | {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"chunk_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [4, 8],
        "axial_pos_embds_dim": [16, 16],
        "hash_seed": 1,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 8,
        "pronunciation_embed_dim": 8,
        "shape_vocab_size": 8,
        "shape_embed_dim": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": FOUR | {"n_mamba_heads": 2},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_key_value_heads": HEADS,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "adapter_rank": 4,
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(name: str) -> PretrainedConfig:
    """Return a small configuration of the model type `name`, without dropout."""
    kind: Any = CONFIG_MAPPING[name]
    default = kind()
    chosen = _fields(default)
    for part in getattr(kind, "sub_configs", {}):
        if isinstance(inside := getattr(default, part, None), PretrainedConfig):
            chosen[part] = {"model_type": inside.model_type} | _fields(inside)
    return kind(**chosen | SPECIAL.get(name, {}))


def _fields(default: PretrainedConfig) -> dict[str, Any]:
    names = set(type(default).attribute_map) | set(vars(default))
    chosen = {name: value for name, value in TINY.items() if name in names}
    noise = (name for name in vars(default) if any(each in name for each in ("drop", "jitter")))
    chosen |= {name: 0.0 for name in noise if isinstance(getattr(default, name), float)}
    if "qk_rope_head_dim" in chosen:  # latent attention
        chosen["num_key_value_heads"] = HEADS
        chosen.pop("head_dim", None)
    return chosen
