"""A sample of what `trimaran predict` reads, for a first try: presets and own shapes, several plans, an adapter."""

import json
from typing import Any

_SHAPE = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq_len": 8192}
_SHARDED: dict[str, Any] = {"sharding": "parameters", "recompute": "selective"}
_ONE_SEQUENCE = {"micro_batch": 1, "global_batch": 64}

EXAMPLE_LINES: tuple[dict[str, Any], ...] = (
    {"id": "8B, ZeRO-3", "model": "llama-3.1-8b", "cluster": "8xH100", "plan": _SHARDED | _ONE_SEQUENCE},
    {
        "id": "8B, tp 2",
        "model": {"preset": "llama-3.1-8b", "seq_len": 8192},
        "cluster": "8xH100",
        "plan": _SHARDED | _ONE_SEQUENCE | {"mesh": {"tp": 2}},
    },
    {
        "id": "own shape, Megatron",
        "model": _SHAPE,
        "cluster": {"gpu": "H100", "gpus": 64, "gpus_per_node": 8},
        "plan": {"mesh": {"tp": 2, "pp": 2}, "sharding": "optimizer", "micro_batch": 1, "global_batch": 512},
        "stack": "megatron",
    },
    {"id": "70B, does not fit", "model": "llama-3.1-70b", "cluster": "4xA100-80GB", "plan": _SHARDED | _ONE_SEQUENCE},
    {
        "id": "70B, LoRA",
        "model": {"preset": "llama-3.1-70b", "adapter": {"kind": "lora", "rank": 16}},
        "cluster": "4xA100-80GB",
        "plan": _ONE_SEQUENCE | {"sharding": "parameters", "recompute": "full", "loss": "fused"},
    },
    {
        "id": "70B, LoRA on 4 bits",
        "model": {"preset": "llama-3.1-70b", "adapter": {"kind": "lora", "rank": 16, "base": "4bit"}},
        "cluster": "1xH100",
        "plan": _ONE_SEQUENCE | {"recompute": "full", "loss": "fused"},
    },
)


def example_text() -> str:
    """Return the sample as the text of a file: one JSON object on each line."""
    return "".join(json.dumps(line) + "\n" for line in EXAMPLE_LINES)
