"""The shape of a decoder, its parameter count and its FLOPs."""

from dataclasses import dataclass

from trimaran.core import Flops
from trimaran.models.expert_variations import ExpertUnit, RouterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions. `factor` above 1 scales the low frequencies as in Llama 3.1."""

    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """The experts that replace each layer's feed-forward block. `shared_ffn` 0 is no shared expert.

    Layers in `dense_layers` keep a feed-forward block of width `ModelSpec.ffn`.

    `balance` weights the load-balancing loss, computed per sequence so that it never depends on the plan; `z_loss`
    weights the squared logsumexp of each token's router logits. `capacity` limits an expert in training to that
    multiple of its even share of a sequence's assignments, earliest first; the others are dropped. 0 is no limit.
    """

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    normalize_top_k: bool = True
    balance: float = 0.01
    z_loss: float = 0.0
    capacity: float = 0.0
    router: RouterSpec = RouterSpec()
    unit: ExpertUnit = ExpertUnit()
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The options of a layer in which Llama and Qwen differ."""

    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    rope: Rope = Rope()
    experts: ExpertSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder. `ffn` is the width of the dense SwiGLU; with experts it is unused."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_seq_len: int
    tied: bool = False
    block: Block = Block()

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention, biases and head norms included."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * width + 2 * kv_width)
        return weights + (width + 2 * kv_width) * self.block.qkv_bias + 2 * self.head_dim * self.block.qk_norm

    @property
    def feed_forward_parameters(self) -> int:
        """Weights of one layer's feed-forward block, all experts counted."""
        if (experts := self.block.experts) is None:
            return 3 * self.hidden * self.ffn
        shared = 3 * self.hidden * experts.shared_ffn + self.hidden * experts.shared_gate
        return self.hidden * experts.num_experts + 3 * self.hidden * experts.ffn * experts.num_experts + shared

    @property
    def active_feed_forward_parameters(self) -> int:
        """Weights of one layer's feed-forward block that a token passes through."""
        if (experts := self.block.experts) is None:
            return self.feed_forward_parameters
        idle = 3 * self.hidden * experts.ffn * (experts.num_experts - experts.top_k)
        return self.feed_forward_parameters - idle

    @property
    def layer_parameters(self) -> int:
        return self.attention_parameters + self.feed_forward_parameters + 2 * self.hidden

    @property
    def num_parameters(self) -> int:
        """All distinct weights; a tied head counts once."""
        ends = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + self.hidden + ends

    def flops_per_token(self, seq_len: int) -> Flops:
        """Return the forward and backward FLOPs of a token: 6 per matmul weight, and causal attention.

        The embedding is a lookup and costs nothing; the head is a matmul even if it is tied.
        """
        weights = self.layers * (self.attention_parameters + self.active_feed_forward_parameters)
        weights += self.vocab * self.hidden
        attention = self.layers * self.heads * self.head_dim * seq_len
        return Flops(6.0 * (weights + attention))
