"""Which positions of a sequence a rank holds, how its queries attend to the keys, and where documents begin and end."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trimaran.nets.decoder.key_value_cache import CachedLayer
from trimaran.nets.paged_cache import PagedLayer
from trimaran.nets.varlen_attention import (
    PLAIN,
    AttentionOptions,
    Segments,
    attention,
    causal_window,
    document_mask,
    flexible_attention,
    has_flex_kernel,
    masked_attention,
    segment_attention,
    varlen_attention,
)

AttentionScope = Tensor | Segments | CachedLayer | PagedLayer | None
"""What each query attends to: a mask, causal segments, cached or paged positions, or None for causal attention."""


class Context:
    """All positions are on this rank. Context parallelism replaces it by one that holds a part of the sequence."""

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
        self, query: Tensor, key: Tensor, value: Tensor, scope: AttentionScope, options: AttentionOptions = PLAIN
    ) -> Tensor:
        """Return the attention output, all [B, heads, T, head_dim]."""
        return attend(query, key, value, scope, options)

    def all_reduce(self, local: Tensor) -> Tensor:
        """Return the sum of `local` over the context-parallel ranks, without gradient."""
        return local

    def gather(self, local: Tensor) -> Tensor:
        """Return all positions [B, T, ...] in order, gathered from every rank's `local`."""
        return local


def attend(
    query: Tensor, key: Tensor, value: Tensor, scope: AttentionScope, options: AttentionOptions = PLAIN
) -> Tensor:
    """Return the attention output of a full sequence, all [B, heads, T, head_dim]."""
    if isinstance(scope, CachedLayer | PagedLayer):
        return scope.attend(query, key, value, options)
    if options.changes_scores or options.limits(query.shape[2]):
        # Attention that is more than the scope: with a window, a soft cap or sinks.
        if isinstance(scope, Segments) and not options.changes_scores and scope.has_kernel(query, value):
            assert options.window is not None, "only a window is left"
            return varlen_attention(query, key, value, scope, (options.window - 1, 0), options.scale)
        if options.changes_scores and not isinstance(scope, Tensor) and has_flex_kernel(query, value):
            window = options.window if options.limits(query.shape[2]) else None
            return flexible_attention(query, key, value, scope, replace(options, window=window))
        positions = torch.arange(query.shape[2], device=query.device)
        mask = causal_window(positions, positions, options.window)
        if scope is not None:
            mask = mask & (scope.mask(causal=True) if isinstance(scope, Segments) else scope)
        return masked_attention(query, key, value, mask, options)
    if isinstance(scope, Segments):
        return segment_attention(query, key, value, scope, causal=True, scale=options.scale)
    return attention(query, key, value, scope, scale=options.scale)


def document_positions(documents: Tensor) -> Tensor:
    """Return the position of each token inside its document; `documents` [B, T] holds runs of equal ids."""
    indices = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.zeros_like(indices)
    starts[:, 1:] = indices[:, 1:] * (documents[:, 1:] != documents[:, :-1])
    return indices - starts.cummax(dim=1).values


def document_lengths(positions: Tensor, documents: Tensor | None) -> Tensor:
    """Return the length of each token's document, [B, T] like `positions` inside the documents; None is one a row."""
    if documents is None:
        return torch.full_like(positions, positions.shape[1])
    indices = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return last_indices(documents) - indices + positions + 1


def last_indices(documents: Tensor) -> Tensor:
    """Return the index of the last token of each token's document in its row, [B, T]."""
    indices = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    ends = torch.full_like(indices, documents.shape[1] - 1)
    ends[:, :-1] = torch.where(documents[:, 1:] != documents[:, :-1], indices[:, :-1], ends[:, :-1])
    return ends.flip(1).cummin(dim=1).values.flip(1)


def split_documents(
    positions: Tensor, documents: Tensor | None, lengths: Sequence[int] | None, chunk: int
) -> tuple[Tensor, Sequence[int] | None]:
    """Return the documents [B, T] of rows in which each chunk is a document of its own, and their lengths, if known.

    `positions` [B, T] count inside each document; without `documents` a row is one.
    """
    rows, length = positions.shape
    if documents is None:
        documents, lengths = torch.zeros_like(positions), [length] * rows
    parts = documents * (-(-length // chunk)) + positions // chunk
    if lengths is None:
        return parts, None
    return parts, [min(chunk, each - start) for each in lengths for start in range(0, each, chunk)]
