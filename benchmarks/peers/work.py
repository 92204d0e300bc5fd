"""The work that every peer of a contest does: shape, batch, precision, and random tokens from a seed."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Self

import numpy as np

SEED = 0
LR = 3e-4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0
THETA = 500_000.0
NUM_ROWS = 512  # different rows


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """The vision tower of a Qwen2-VL model, and the one image of each row: `pixels` a side."""

    layers: int
    hidden: int
    heads: int
    pixels: int
    patch: int = 14
    merge: int = 2

    @property
    def patches(self) -> int:
        """Patches along one side of an image."""
        return self.pixels // self.patch

    @property
    def tokens(self) -> int:
        """Tokens of an image in its row."""
        return (self.patches // self.merge) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama decoder with an untied head; with `experts` a Qwen3-MoE; with `vision` a Qwen2-VL with a tied head."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 128_256
    vision: VisionShape | None = None
    experts: int = 0  # in every layer, each `ffn` wide; 0: dense
    top_k: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def config(self, seq_len: int) -> dict[str, Any]:
        """Return the content of the `config.json` from which transformers and Trimaran read this shape."""
        if self.experts:
            return self._qwen3_moe(seq_len)
        return self._llama(seq_len) if self.vision is None else self._qwen2_vl(self.vision, seq_len)

    def _qwen3_moe(self, seq_len: int) -> dict[str, Any]:
        return self._llama(seq_len) | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.ffn,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
            "router_aux_loss_coef": 0.0,
        }

    def _qwen2_vl(self, vision: VisionShape, seq_len: int) -> dict[str, Any]:
        half = self.head_dim // 2
        sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
        own = {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": sections},
            "tie_word_embeddings": True,
            "image_token_id": self.vocab - 1,
            "video_token_id": self.vocab - 2,
            "vision_start_token_id": self.vocab - 3,
            "vision_end_token_id": self.vocab - 4,
            "vision_config": {
                "depth": vision.layers,
                "embed_dim": vision.hidden,
                "hidden_size": self.hidden,
                "hidden_act": "quick_gelu",
                "mlp_ratio": 4,
                "num_heads": vision.heads,
                "in_channels": 3,
                "patch_size": vision.patch,
                "spatial_merge_size": vision.merge,
                "temporal_patch_size": 2,
            },
        }
        gone = ("head_dim", "attention_bias", "mlp_bias")
        return {name: value for name, value in self._llama(seq_len).items() if name not in gone} | own

    def _llama(self, seq_len: int) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": max(seq_len, 8192),
            "rms_norm_eps": 1e-5,
            "rope_theta": THETA,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }


SHAPES = {
    "25m": Shape(layers=8, hidden=256, heads=4, kv_heads=4, ffn=704, vocab=32_000),
    "60m": Shape(layers=8, hidden=512, heads=8, kv_heads=8, ffn=1376, vocab=32_000),
    "160m": Shape(layers=12, hidden=768, heads=12, kv_heads=12, ffn=2048, vocab=32_000),
    "360m": Shape(layers=24, hidden=1024, heads=16, kv_heads=16, ffn=2816, vocab=32_000),
    "1b": Shape(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192),
    "3b": Shape(layers=28, hidden=3072, heads=24, kv_heads=8, ffn=8192),
    "8b": Shape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336),
    "vlm": Shape(
        layers=28,
        hidden=1536,
        heads=12,
        kv_heads=2,
        ffn=8960,
        vocab=151_936,
        vision=VisionShape(layers=32, hidden=1280, heads=16, pixels=448),
    ),
    "tiny-vlm": Shape(
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        ffn=192,
        vocab=512,
        vision=VisionShape(layers=2, hidden=32, heads=2, pixels=56),
    ),
    "moe": Shape(layers=16, hidden=1024, heads=16, kv_heads=8, ffn=2816, vocab=32_000, experts=8, top_k=2),
    "moe-64": Shape(layers=6, hidden=2048, heads=16, kv_heads=4, ffn=768, vocab=32_000, experts=64, top_k=8),
    "tiny-moe": Shape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=512, experts=4, top_k=2),
    "cpu": Shape(layers=4, hidden=192, heads=6, kv_heads=6, ffn=512, vocab=4096),
    "tiny": Shape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=192, vocab=512),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one process trains. After `warm` untimed steps, `windows` groups of `steps` steps are timed.

    Where peers alternate window by window, `settle` untimed steps follow every pause. `micro_batch` is per rank.
    """

    contest: str
    peer: str
    shape: str
    seq_len: int
    micro_batch: int
    grad_accum: int = 1
    ranks: int = 1
    precision: str = "bf16"
    recompute: str = "none"
    compile: bool = True
    layers: int | None = None  # overrides those of the shape
    adapter: dict[str, Any] = field(default_factory=dict)  # `rank`, `alpha` and `base` of LoRA; empty: no adapter
    options: dict[str, Any] = field(default_factory=dict)  # of this peer only
    warm: int = 5
    settle: int = 0
    windows: int = 3
    steps: int = 6

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def model(self) -> Shape:
        shape = SHAPES[self.shape]
        return shape if self.layers is None else replace(shape, layers=self.layers)

    @property
    def all_steps(self) -> int:
        return self.warm + self.windows * (self.settle + self.steps)

    @property
    def rows_per_step(self) -> int:
        return self.micro_batch * self.grad_accum * self.ranks

    @property
    def tokens_per_step(self) -> int:
        return self.rows_per_step * self.seq_len


def draw_row(work: Work, index: int) -> np.ndarray:
    """Return `seq_len + 1` random tokens as int64. The row depends only on its index, so all peers get the same.

    Rows repeat after `NUM_ROWS`, so that drawing them costs nothing in a timed step.
    """
    return _rows(work.model.vocab, work.seq_len)[index % NUM_ROWS]


@cache
def _rows(vocab: int, seq_len: int) -> np.ndarray:
    return np.random.default_rng(SEED).integers(vocab, size=(NUM_ROWS, seq_len + 1))


def draw_batches(work: Work, rank: int = 0) -> Iterator[np.ndarray]:
    """Yield this rank's micro-batches [rows, seq_len + 1] without end."""
    number = rank
    while True:
        yield np.stack([draw_row(work, number * work.micro_batch + row) for row in range(work.micro_batch)])
        number += work.ranks
