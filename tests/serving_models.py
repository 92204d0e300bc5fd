"""Small networks of ours with random weights, and prompts, for tests of serving over ranks.

Imports neither transformers nor torchao: torchao initialises CUDA when it is imported, and then no rank can be forked.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.random_weights import perturb
from tests.serving_ranks import PAGE_SIZE
from trimaran.checkpoint import write_hf_folder
from trimaran.models import PRESETS, spec_from_hf
from trimaran.nets import Network, initialise, network_of

SHAPE: dict[str, Any] = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 97,
                         "max_seq_len": 64}  # fmt: skip
DENSE = replace(PRESETS["tiny"], **SHAPE)
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "vocab_size": 97, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
SPECS = {
    "tied-odd-vocabulary": DENSE,
    "qkv-bias": replace(DENSE, tied=False, block=PRESETS["qwen2.5-7b"].block),
    "qk-norm": replace(DENSE, tied=False, block=PRESETS["qwen3-8b"].block),
    "experts": replace(PRESETS["tiny-moe"], layers=2, hidden=32, head_dim=8, vocab=97, max_seq_len=64),
    "latent": spec_from_hf(LATENT, where="here"),
}
# The first two share a prefix of two pages. Longer prompts than a step of 16 tokens are computed in parts.
PREFIX = [(7 * number + 3) % 97 for number in range(2 * PAGE_SIZE)]
PROMPTS = [
    [*PREFIX, 5, 11, 17],
    [*PREFIX, 60],
    [1, 2, 3],
    [(5 * number + 1) % 97 for number in range(21)],
    [42],
]
TOKENS = 9


def random_network(spec: Any, seed: int = 1) -> Network:
    torch.manual_seed(seed)
    network = network_of(spec)
    initialise(network.module, seed=seed, spec=spec)
    perturb(network.module)
    return network


def save_spec(spec: Any, folder: Path, *, seed: int = 1) -> Path:
    """Save our network of this shape with random weights as a Hugging Face folder."""
    network = random_network(spec, seed)
    write_hf_folder(folder, network.disk_config(), network.disk_tensors(), origin=None, add_files=lambda _: None)
    return folder
