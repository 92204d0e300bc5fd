"""Small, named variations of a decoder's layers, beyond Llama's. The defaults are Llama's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from trimaran.models.expert_variations import LatentSpec
from trimaran.models.rope import Rope

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
