"""Which positions of a sequence a rank holds, and how its queries meet the keys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.nets.varlen_attention import Segments, attention, document_mask, segment_attention

Sight = Tensor | Segments | None
"""Who may look at whom: a mask, segments whose tokens see what went before, or None: all that went before."""


class Context:
    """Every position, at home. Context parallelism puts another one in its place, which holds a part."""

    def mine(self, whole: Tensor) -> Tensor:
        """Return this rank's positions of `whole` [B, T]."""
        return whole

    def mask(self, documents: Tensor) -> Tensor:
        """Return which keys each query of this rank may see, for `documents` [B, T] of the whole sequence."""
        return document_mask(documents)

    def sight(self, documents: Tensor, lengths: Sequence[int] | None = None) -> Sight:
        """Return the same in the form that `attend` is quickest with; `lengths` of the documents if the host knows."""
        return Segments.of_documents(documents, lengths)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sight: Sight, scale: float | None = None) -> Tensor:
        """Return what each query gathers, all [B, heads, T, head_dim]."""
        return attend(query, key, value, sight, scale=scale)

    def total(self, mine: Tensor) -> Tensor:
        """Return the sum of `mine` over the ranks that share a sequence; no gradient flows."""
        return mine

    def whole(self, mine: Tensor) -> Tensor:
        """Return all positions [B, T, ...] in order, of which `mine` are this rank's."""
        return mine


def attend(query: Tensor, key: Tensor, value: Tensor, sight: Sight, *, scale: float | None = None) -> Tensor:
    """Return what each query gathers of a whole sequence, all [B, heads, T, head_dim]."""
    if isinstance(sight, Segments):
        return segment_attention(query, key, value, sight, causal=True, scale=scale)
    return attention(query, key, value, sight, scale=scale)


def document_positions(documents: Tensor) -> Tensor:
    """Return the position of each token inside its document; `documents` [B, T] holds runs of equal ids."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.zeros_like(places)
    starts[:, 1:] = places[:, 1:] * (documents[:, 1:] != documents[:, :-1])
    return places - starts.cummax(dim=1).values
