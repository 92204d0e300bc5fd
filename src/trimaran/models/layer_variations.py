"""Small, named variations of a decoder's layers, beyond Llama's and, for experts, Qwen's. These are the defaults."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        windows = [self.window_of(number) or 0 for number in range(layers)]
        rotated = [self.has_rope(number) for number in range(layers)]
        return replace(
            self,
            windows=repeated_part(windows) if any(windows) else (),
            rope_layers=() if all(rotated) else repeated_part(rotated),
        )


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

    @property
    def per_layer(self) -> int:
        """The number of norms of a layer, without those of queries and keys."""
        return len(norm_names(self))


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


PLAIN_ATTENTION, PLAIN_NORMS, PLAIN_ENDS = AttentionSpec(), NormSpec(), Ends()
