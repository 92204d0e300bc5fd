"""Small random models of every dense architecture that our decoder supports, as configurations of transformers."""

from typing import Any

from transformers import (
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = 7  # shorter than the sequences of the tests, so that it matters
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 4.0, 8.0],
    "partial_rotary_factor": 0.75,
}
GEMMA: dict[str, Any] = SMALL | {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
GEMMA_3_ROPE: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama-biased": LlamaConfig(**SMALL, attention_bias=True),
    "llama-yarn": LlamaConfig(**SMALL, rope_parameters=YARN),
    "llama-linear": LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}),
    "mistral": MistralConfig(**SMALL, head_dim=16, sliding_window=WINDOW),
    "mistral-full": MistralConfig(**SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**SMALL, head_dim=16, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "gemma": GemmaConfig(**SMALL, head_dim=16),
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(**GEMMA, layer_types=ALTERNATING, rope_parameters=GEMMA_3_ROPE),
    "phi3": Phi3Config(**SMALL, sliding_window=WINDOW),
    "phi4-mini": Phi3Config(**SMALL, original_max_position_embeddings=64, rope_parameters=LONGROPE),
    "phi3-long": Phi3Config(**SMALL, original_max_position_embeddings=16, rope_parameters=LONGROPE),
    "olmo2": Olmo2Config(**SMALL),
    "cohere": CohereConfig(**SMALL, attention_bias=True, logit_scale=0.5),
    "cohere2": Cohere2Config(**SMALL, sliding_window=WINDOW, layer_types=ALTERNATING, logit_scale=0.5),
    "glm": GlmConfig(**SMALL, head_dim=16),
    "glm4": Glm4Config(**SMALL, head_dim=16, attention_bias=False),
}  # fmt: skip
