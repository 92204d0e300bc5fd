"""The shape of a decoder, and its parameter count."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from trimaran.models.layer_variations import (
    PLAIN_ATTENTION,
    PLAIN_ENDS,
    PLAIN_NORMS,
    PLAIN_ROPE,
    PLAIN_ROUTER,
    PLAIN_UNIT,
    AttentionSpec,
    Ends,
    ExpertUnit,
    NormSpec,
    PredictionSpec,
    Rope,
    RouterSpec,
)


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
    router: RouterSpec = PLAIN_ROUTER
    unit: ExpertUnit = PLAIN_UNIT
    dense_layers: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether these are the experts of Qwen: no variation of the router or an expert, and no dense layers."""
        return (self.router, self.unit, self.dense_layers) == (PLAIN_ROUTER, PLAIN_UNIT, ())

    def biases(self, hidden: int) -> int:
        """Return how many biases a layer's router and experts have."""
        of_expert = (2 * self.ffn + hidden) * self.unit.bias
        return self.num_experts * (of_expert + self.router.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The options of a layer in which families differ."""

    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    rope: Rope = PLAIN_ROPE
    experts: ExpertSpec | None = None
    attention: AttentionSpec = PLAIN_ATTENTION
    norm: NormSpec = PLAIN_NORMS
    ends: Ends = PLAIN_ENDS
    activation: Literal["silu", "gelu_tanh"] = "silu"
    prediction: PredictionSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one layer has that others of the same decoder may not have.

    `window` None is attention to all earlier keys, `rope` None no rotary positions, `experts` None a dense layer. With
    a `chunk` a query attends to its own chunk of the document only.
    """

    window: int | None
    rope: Rope | None
    experts: ExpertSpec | None
    ffn: int
    chunk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialRules:
    """How a weight starts: a norm at `norm`, a matrix with normal values.

    Their standard deviation is a constant, or 1 / sqrt(fan_in) if `by_fan_in`. It is smaller for a matrix that adds to
    a residual stream, of `depth` layers.
    """

    depth: int
    by_fan_in: bool = False
    norm: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder. `ffn` is the width of the dense feed-forward; with experts it is unused.

    `family` is the Hugging Face architecture that the model is written as; empty is the first one that can express it.
    """

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
    family: str = field(default="", compare=False)

    @property
    def language(self) -> "ModelSpec":
        """The decoder of the model: itself."""
        return self

    @property
    def vision(self) -> None:
        """The vision tower: none."""
        return

    @property
    def tower_names(self) -> tuple[str, ...]:
        """The towers, in forward order."""
        return ("language",)

    def images(self) -> None:
        """Return the rules by which the data preprocesses images: none."""

    def scenes(self) -> None:
        """Return the rules by which the data renders scenes: none."""

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike."""
        attention, experts = self.block.attention, self.block.experts
        has_dense_layers = experts is not None and bool(experts.dense_layers)
        return len(attention.windows) <= 1 and len(attention.rope_layers) <= 1 and not has_dense_layers

    @property
    def prediction_layers(self) -> int:
        """The number of layers after the last one that predict later tokens; see `PredictionSpec`."""
        return self.block.prediction.layers if self.block.prediction else 0

    @property
    def num_blocks(self) -> int:
        """All layers, with those that predict later tokens."""
        return self.layers + self.prediction_layers

    @property
    def shares_embedding(self) -> bool:
        """Whether the last pipeline stage needs the embedding, too: as the head, or to predict later tokens."""
        return self.tied or self.prediction_layers > 0

    def initial_rules(self, name: str) -> InitialRules:
        """Return how the parameter `name` starts. A norm that adds 1 to its weights starts at 0."""
        return InitialRules(depth=self.layers, norm=0.0 if self.block.norm.unit_offset else 1.0)

    def tensor_sizes(self, whole: Collection[str] = ()) -> dict[str, int]:
        """Return what tensor parallelism splits, by name: heads and widths."""
        experts, sizes = self.block.experts, {"heads": self.heads, "KV heads": self.kv_heads}
        if experts is None:
            sizes["features of the feed-forward"] = self.ffn
        else:
            sizes["features of an expert"] = experts.ffn
            sizes |= {"features of the shared expert": experts.shared_ffn} if experts.shared_ffn else {}
            sizes |= {"features of the dense layers": self.ffn} if experts.dense_layers else {}
        return sizes

    def layer(self, number: int) -> LayerSpec:
        """Return what layer `number` has."""
        attention, experts = self.block.attention, self.block.experts
        window = attention.window_of(number)
        rope = self.block.rope if window is None or attention.local_rope is None else attention.local_rope
        return LayerSpec(
            window=window,
            rope=rope if attention.has_rope(number) else None,
            experts=None if experts is not None and number in experts.dense_layers else experts,
            ffn=self.ffn,
            chunk=(attention.chunk or None) if attention.has_rope(number) else None,
        )

    @property
    def embedding_scale(self) -> float:
        """What the stream is multiplied by after the embedding."""
        return self.block.ends.embedding_scale or self.hidden**0.5

    @property
    def attention_extras(self) -> int:
        """Weights of one layer's attention outside the matmuls and the biases of its input: norms, out bias, sinks."""
        if (latent := self.block.attention.latent) is not None:
            return latent.extras(self.hidden)
        attention, width = self.block.attention, self.heads * self.head_dim
        norms = width + self.kv_heads * self.head_dim if attention.wide_qk_norm else 2 * self.head_dim
        return norms * self.block.qk_norm + self.hidden * attention.out_bias + self.heads * attention.sinks

    @property
    def num_parameters(self) -> int:
        """All distinct weights; a tied head counts once."""
        from trimaran.models.outline import outline_of  # noqa: PLC0415  it imports this module

        return outline_of(self).num_parameters


def variations(spec: ModelSpec) -> list[str]:
    """Return what the layers and ends of `spec` have that no Llama or Qwen has."""
    block, attention, norm, rope = spec.block, spec.block.attention, spec.block.norm, spec.block.rope
    has = {
        "an attention window": any(attention.windows),
        "layers without rotary positions": not all(attention.rope_layers),
        "a bias after attention": attention.out_bias,
        "a norm over all heads": attention.wide_qk_norm,
        "its own scale of scores": attention.scale > 0,
        "a soft cap of scores": attention.softcap > 0,
        "sinks": attention.sinks,
        "LayerNorm": norm.kind == "layer",
        "norms with a unit offset": norm.unit_offset,
        f"norms {norm.placement} attention": norm.placement != "before",
        "a parallel feed-forward": norm.parallel,
        "a scaled embedding": block.ends.embedding_scale != 1,
        "scaled or capped logits": not block.ends.bare_head,
        f"the activation {block.activation}": block.activation != "silu",
        f"{rope.scaling} positions": rope.scaling != "llama3",
        "partly rotated heads": rope.rotary_dim > 0,
        "interleaved rotary pairs": rope.interleaved,
        "latent attention": attention.latent is not None,
        "chunked attention": attention.chunk > 0,
        "multi-token prediction": block.prediction is not None,
        "varied routing or experts": block.experts is not None and not block.experts.is_plain,
    }
    return [name for name, present in has.items() if present]


def rows_per_rank(rows: int, degree: int) -> int:
    """Return how many rows the first of `degree` ranks holds; the last ranks may hold fewer."""
    return -(-rows // degree)


def every_rank_has_rows(rows: int, degree: int) -> bool:
    """Return whether no rank is left without rows."""
    return rows_per_rank(rows, degree) * (degree - 1) < rows
