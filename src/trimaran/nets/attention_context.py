"""Which positions of a sequence a rank holds, and how its queries attend to the keys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.nets.key_value_cache import CachedLayer
from trimaran.nets.paged_cache import AttentionOptions, PagedLayer
from trimaran.nets.varlen_attention import Segments, attention, document_mask, segment_attention

AttentionScope = Tensor | Segments | CachedLayer | PagedLayer | None
"""What each query attends to: a mask, causal segments, cached or paged positions, or None for causal attention."""


class Context:
    """All positions are on this rank. Context parallelism reindices it by one that holds a part of the sequence."""

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's positions of `full` [B, T]."""
        return full

    def mask(self, documents: Tensor) -> Tensor:
        """Return the attention mask of this rank's queries, for `documents` [B, T] of the full sequence."""
        return document_mask(documents)

    def scope(self, documents: Tensor, lengths: Sequence[int] | None = None) -> AttentionScope:
        """Return the mask in the form that `attend` handles fastest; `lengths` are those of the documents, if known."""
        return Segments.of_documents(documents, lengths)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scope: AttentionScope, scale: float | None = None
    ) -> Tensor:
        """Return the attention output, all [B, heads, T, head_dim]."""
        return attend(query, key, value, scope, scale=scale)

    def all_reduce(self, local: Tensor) -> Tensor:
        """Return the sum of `local` over the context-parallel ranks, without gradient."""
        return local

    def gather(self, local: Tensor) -> Tensor:
        """Return all positions [B, T, ...] in order, gathered from every rank's `local`."""
        return local


def attend(query: Tensor, key: Tensor, value: Tensor, scope: AttentionScope, *, scale: float | None = None) -> Tensor:
    """Return the attention output of a full sequence, all [B, heads, T, head_dim]."""
    if isinstance(scope, CachedLayer):
        return scope.attend(query, key, value, scale=scale)
    if isinstance(scope, PagedLayer):
        return scope.attend(query, key, value, AttentionOptions(scale=scale))
    if isinstance(scope, Segments):
        return segment_attention(query, key, value, scope, causal=True, scale=scale)
    return attention(query, key, value, scope, scale=scale)


def document_positions(documents: Tensor) -> Tensor:
    """Return the position of each token inside its document; `documents` [B, T] holds runs of equal ids."""
    indices = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.zeros_like(indices)
    starts[:, 1:] = indices[:, 1:] * (documents[:, 1:] != documents[:, :-1])
    return indices - starts.cummax(dim=1).values
