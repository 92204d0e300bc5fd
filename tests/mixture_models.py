"""Tiny Hugging Face mixtures of experts of many architectures, with random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GROUPED: dict[str, Any] = SMALL | {"num_key_value_heads": 2, "head_dim": 16}
LATENT: dict[str, Any] = SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
}
FEW: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
NO_MTP: dict[str, Any] = {"num_nextn_predict_layers": 0}
THETA: dict[str, Any] = {"rope_type": "default", "rope_theta": 5_000.0}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "rope_theta": 5_000.0,
}
SCALED: dict[str, Any] = {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", **GROUPED, **FEW},
    "mixtral-window": {"model_type": "mixtral", **GROUPED, **FEW, "sliding_window": 7},
    "deepseek-v3": {"model_type": "deepseek_v3", **LATENT, **SHARED, **GROUPS, **NO_MTP, **SCALED},
    "deepseek-v3-plain": {
        "model_type": "deepseek_v3",
        **LATENT | SHARED | NO_MTP,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "rope_interleave": False,
        "attention_bias": True,
    },
    "deepseek-v2": {"model_type": "deepseek_v2", **LATENT, **SHARED, **GROUPS, "topk_method": "group_limited_greedy"},
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        **LATENT | SHARED | SCALED,
        "q_lora_rank": None,
        "topk_method": "greedy",
    },
    "glm-4.5": {
        "model_type": "glm4_moe",
        **GROUPED | SHARED | NO_MTP,
        "use_qk_norm": True,
        "attention_bias": True,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        **GROUPED | FEW,
        "sliding_window": 6,
        "rope_parameters": YARN | {"truncate": False},
    },
    "llama-4": {
        "model_type": "llama4_text",
        **GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 16},
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 12,
        "floor_scale": 8,
        "attn_scale": 0.3,
        "rope_parameters": THETA,
    },
    "gpt-oss-plain": {"model_type": "gpt_oss", **GROUPED, **FEW, "sliding_window": 6, "rope_parameters": THETA},
}


def save_mixture(name: str, folder: Path) -> PreTrainedModel:
    """Save one of MIXTURES, and return it. No weight has a neutral value that could hide a mistake."""
    fields = dict(MIXTURES[name])
    torch.manual_seed(0)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, each in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in key:
                each.normal_(float(each.ndim == 1 and "norm" in key), 0.2 if each.ndim == 1 else 0.1)
    model.save_pretrained(folder)
    return model
