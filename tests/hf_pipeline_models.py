"""Tiny Hugging Face models for pipelines and experts: at least four layers, and the vocabulary of bytes."""

from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

from tests.hf_models import UNDROPPED

NARROW: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GROUPED: dict[str, Any] = NARROW | {"num_key_value_heads": 2}
OLD: dict[str, Any] = {"vocab_size": 320, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
NO_DROPOUT: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
# The kind of a config, and its arguments.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "llama-tied": ("LlamaConfig", GROUPED | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", OLD | UNDROPPED),
    "gptj": ("GPTJConfig", OLD | UNDROPPED | {"rotary_dim": 4}),
    "gpt-neox": ("GPTNeoXConfig", NARROW | NO_DROPOUT),
    "opt": ("OPTConfig", NARROW | {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0, "pad_token_id": None}),
    "phi": ("PhiConfig", NARROW),
    "phi3": ("Phi3Config", GROUPED | {"pad_token_id": 0}),
    "gemma2": ("Gemma2Config", GROUPED | {"head_dim": 8, "sliding_window": 6}),
    "falcon": ("FalconConfig", NARROW),
    "bloom": ("BloomConfig", {"vocab_size": 320, "hidden_size": 32, "n_layer": 4, "n_head": 4} | NO_DROPOUT),
    "qwen3": ("Qwen3Config", GROUPED | {"head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", GROUPED | {"head_dim": 8, "sliding_window": 6}),
    "cohere": ("CohereConfig", GROUPED),
    "mixtral": ("MixtralConfig", GROUPED | {"num_local_experts": 4}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        GROUPED | EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", GROUPED | EXPERTS | {"moe_intermediate_size": 16, "head_dim": 8}),
    "olmoe": ("OlmoeConfig", GROUPED | EXPERTS),
    "gpt-oss": ("GptOssConfig", GROUPED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def config_of(name: str, **changes: Any) -> PretrainedConfig:
    kind, fields = MODELS[name]
    return getattr(transformers, kind)(**fields | changes)


def save_config(name: str, folder: Path, **changes: Any) -> Path:
    """Save the config of one of MODELS, without weights, and return the folder."""
    config_of(name, **changes).save_pretrained(folder)
    return folder
