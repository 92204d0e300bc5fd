"""Tiny Hugging Face models of many architectures."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

NARROW: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
SMALL: dict[str, Any] = NARROW | {"num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
LLAMA3: dict[str, Any] = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
}
LAYERS = ["sliding_attention", "full_attention"]
UNDROPPED: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL, **LLAMA3),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-odd": LlamaConfig(**SMALL | {"vocab_size": 97}, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "mistral": MistralConfig(**SMALL, head_dim=8, sliding_window=6),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=6, layer_types=LAYERS),
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, **UNDROPPED),
    "gpt-neox": GPTNeoXConfig(**NARROW, attention_dropout=0.0, hidden_dropout=0.0),
    "phi3": Phi3Config(**SMALL, pad_token_id=0),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**SMALL, **EXPERTS),
}


def save_model(name: str, folder: Path) -> Path:
    """Save one of CONFIGS with random weights, and return the folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(folder)
    return folder
