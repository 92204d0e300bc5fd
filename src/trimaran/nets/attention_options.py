"""What a layer adds to plain causal attention: a window, a soft cap or sinks; and attention with them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.nets.decoder.varlen_attention import attention


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What the attention of some architectures adds: a window of the last keys, a soft cap of scores, sinks [heads].

    A `window` counts the query's own key: 1 is attention to oneself only. `scale` None is 1 / sqrt(head_dim). `chunk`
    concerns cached and paged keys only: otherwise the scope splits documents into chunks.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None

    @property
    def changes_scores(self) -> bool:
        """Whether softmax is not that of the scaled products, so that no kernel of plain attention computes it."""
        return bool(self.softcap) or self.sinks is not None

    def limits(self, num_keys: int) -> bool:
        """Return whether the window hides some of so many keys from the last query."""
        return self.window is not None and self.window < num_keys

    def hides_cached(self, num_keys: int) -> bool:
        """Return whether the window or the chunk hides some of so many cached keys from the last query."""
        return self.limits(num_keys) or (self.chunk is not None and self.chunk < num_keys)


PLAIN = AttentionOptions()


def cached_mask(queries: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    """Return which cached keys each query attends to, as `causal_window` does, and inside its chunk."""
    mask = causal_window(queries, keys, options.window)
    if options.chunk is None:
        return mask
    return mask & (keys[..., None, :] >= (queries // options.chunk * options.chunk)[..., :, None])


def causal_window(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which keys each query attends to, given their positions [..., T], as a mask [..., queries, keys]."""
    distances = queries[..., :, None] - keys[..., None, :]
    return distances >= 0 if window is None else (distances >= 0) & (distances < window)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: AttentionOptions,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention under a mask, which includes the window; all [B, heads, T, head_dim].

    `sinks` are one for each query head, [heads], or [key heads, queries]; they replace those of the options.
    """
    sinks = options.sinks if sinks is None else sinks
    if not options.softcap and sinks is None:
        return attention(query, key, value, mask, causal=False, scale=options.scale)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = (query @ key.transpose(-2, -1)).float() * scale
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:  # a score that takes its part of the probability, and has no value
        column = sinks.float().reshape(1, scores.shape[1], -1, 1).expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value
