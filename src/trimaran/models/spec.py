"""The shape of a decoder, and its parameter count."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN's own settings. `attention_factor` scales cosines and sines; 0 computes it from the factor.

    `mscale` and `mscale_all_dim` are DeepSeek's two terms of that factor; 0 is none.
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope:
    """Phi-3's divisors of each frequency, for sequences up to the original length and for longer ones.

    `attention_factor` scales cosines and sines; 0 computes it from the factor.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions. `factor` above 1 scales the frequencies in the way of `scaling`, by default as in Llama 3.1.

    `rotary_dim` are the first features of each head that are rotated; 0 is all of them. `interleaved`: a pair are
    neighbouring features, not one of the first half and one of the second.
    """

    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    scaling: Literal["llama3", "linear", "yarn", "longrope"] = "llama3"
    rotary_dim: int = 0
    interleaved: bool = False
    yarn: Yarn | None = None
    longrope: LongRope | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every feature of a head is rotated with one of the other half, as the fast kernels do it."""
        return not self.rotary_dim and not self.interleaved


PLAIN_ROPE = Rope()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How a router scores and chooses experts.

    `scoring` turns a token's logits into the weights of experts. With `groups` above 1 a token first chooses the
    `top_groups` groups whose best `group_top` experts have the largest sum, and then experts of those. `scale`
    multiplies the weights. `bias`: the logits have a learned bias. `correction`: a bias that is added to the scores
    when experts are chosen, but not to their weights; no gradient changes it. After each optimizer step it grows by
    `correction_rate` for experts with less than the mean load, and shrinks for those with more (DeepSeek-V3).
    `weights_input`: weights multiply what an expert is given and not what it returns (Llama-4).
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_top: int = 1
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    correction_rate: float = 0.0
    weights_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertUnit:
    """How the feed-forward of an expert differs from SwiGLU.

    `bias`: its three projections have biases. `limit` above 0 clamps the gate from above and the other projection on
    both sides; the gate is then multiplied by the sigmoid of `alpha` times itself, and the other projection is
    increased by one (GPT-OSS).
    """

    bias: bool = False
    limit: float = 0.0
    alpha: float = 1.702


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek): keys and values of all heads are made from one vector of `kv_rank`.

    `nope_dim` and `rope_dim` are the features of a query and a key without and with rotary positions; the latter are
    the same for all heads' keys. `value_dim` is the width of a head's value. `query_rank` 0 is a query without a latent
    vector. `norm_eps` is that of the norms of the latent vectors, which is fixed in these models.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int = 0
    bias: bool = False
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """The width of a head's query and key."""
        return self.nope_dim + self.rope_dim

    def extras(self, hidden: int) -> int:
        """Return the weights of one layer's attention outside matmuls: norms and biases."""
        biases = self.query_rank + self.kv_rank + self.rope_dim + hidden
        return self.query_rank + self.kv_rank + biases * self.bias


PLAIN_ROUTER, PLAIN_UNIT = RouterSpec(), ExpertUnit()


Value = TypeVar("Value")


def repeated_part(values: Sequence[Value]) -> tuple[Value, ...]:
    """Return the shortest start of `values` that gives all of them if it is repeated."""
    total = len(values)
    sizes = (size for size in range(1, total) if all(values[n] == values[n % size] for n in range(total)))
    return tuple(values[: next(sizes, total)])


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureSpec:
    """Queries of layers without rotary positions grow: by `scale` times the log of 1 + position / `interval`."""

    interval: int = 8192
    scale: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """How attention differs from Llama's.

    `windows` are those of the layers in order, 0 for none, and start again after the last: (4096, 0) gives every other
    layer a window. `rope_layers` say in the same way which layers have rotary positions; empty is all. `local_rope` is
    the rope of the layers with a window, if it is another one. `scale` 0 is 1 / sqrt(head_dim); `softcap` 0 is none.
    `wide_qk_norm`: one norm over all heads together instead of one for each head. `sinks`: each head has a learned
    score that no key has. `latent`: keys and values are made from one narrow vector (DeepSeek). Llama-4: layers with
    rotary positions attend inside chunks of `chunk` tokens of a document (0 is none) and, with `unit_qk_norm`, norm
    queries and keys without a weight; `temperature` is that of the other layers.
    """

    out_bias: bool = False
    wide_qk_norm: bool = False
    scale: float = 0.0
    softcap: float = 0.0
    sinks: bool = False
    windows: tuple[int, ...] = ()
    rope_layers: tuple[bool, ...] = ()
    local_rope: Rope | None = None
    latent: LatentSpec | None = None
    chunk: int = 0
    unit_qk_norm: bool = False
    temperature: TemperatureSpec | None = None

    def window_of(self, number: int) -> int | None:
        """Return the window of layer `number`; None if it has none."""
        return (self.windows[number % len(self.windows)] or None) if self.windows else None

    def has_rope(self, number: int) -> bool:
        """Return whether layer `number` has rotary positions."""
        return not self.rope_layers or self.rope_layers[number % len(self.rope_layers)]

    def shortest(self, layers: int) -> "AttentionSpec":
        """Return the same for a decoder with so many layers, with the shortest patterns."""
        windows = repeated_part([self.window_of(number) or 0 for number in range(layers)])
        rotated = repeated_part([self.has_rope(number) for number in range(layers)])
        return replace(self, windows=() if windows == (0,) else windows, rope_layers=() if all(rotated) else rotated)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """How norms differ from Llama's.

    `kind` layer is LayerNorm without bias. `unit_offset`: the weight is the difference from one (Gemma). `placement`:
    before attention and feed-forward, after each of them (OLMo-2), or both (Gemma 2). `parallel`: attention and
    feed-forward have the same input, one norm of the stream, and both are added to it (Cohere).
    """

    kind: Literal["rms", "layer"] = "rms"
    unit_offset: bool = False
    placement: Literal["before", "after", "both"] = "before"
    parallel: bool = False


def norm_names(spec: NormSpec) -> tuple[str, ...]:
    """Return the names of a layer's norms, without those of queries and keys."""
    return ("input_layernorm",) if spec.parallel else _NORM_NAMES[spec.placement]


_NORM_NAMES = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What happens to the stream after the embedding, and to the logits after the head.

    `embedding_scale` multiplies the stream; 0 is sqrt(hidden), as in Gemma. The logits are multiplied by `logit_scale`,
    and then capped softly unless `logit_softcap` is 0.
    """

    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    @property
    def bare_head(self) -> bool:
        """Whether the logits are the head's matmul and nothing more, as a fused loss needs them."""
        return self.logit_scale == 1.0 and not self.logit_softcap


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionSpec:
    """Multi-token prediction (DeepSeek-V3, GLM-4.5): `layers` more layers after the last one, trained but not served.

    The k-th of them predicts the token k + 1 places ahead, from the output of the one before it and the embedding of
    the token k places ahead. The mean of their losses, times `weight`, is added to the loss.
    """

    layers: int
    weight: float


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
    attention: AttentionSpec = AttentionSpec()
    norm: NormSpec = NormSpec()
    ends: Ends = Ends()
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
