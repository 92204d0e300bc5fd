"""Which positions of a sequence a rank holds, and how its queries meet the keys."""

import torch
import torch.nn.functional as F
from torch import Tensor


class Context:
    """Every position, at home. Context parallelism puts another one in its place, which holds a part."""

    def mine(self, whole: Tensor) -> Tensor:
        """Return this rank's positions of `whole` [B, T]."""
        return whole

    def mask(self, documents: Tensor) -> Tensor:
        """Return which keys each query of this rank may see, for `documents` [B, T] of the whole sequence."""
        return document_mask(documents)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None
    ) -> Tensor:
        """Return what each query gathers, all [B, heads, T, head_dim]. Without a mask it sees all that went before."""
        return attention(query, key, value, mask, scale=scale)

    def total(self, mine: Tensor) -> Tensor:
        """Return the sum of `mine` over the ranks that share a sequence; no gradient flows."""
        return mine

    def whole(self, mine: Tensor) -> Tensor:
        """Return all positions [B, T, ...] in order, of which `mine` are this rank's."""
        return mine


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float | None = None) -> Tensor:
    """Return scaled dot-product attention with grouped heads, causal where there is no mask."""
    # The flash kernels read grouped heads as they are. Those that take a mask or fp32 do not, and unless the heads are
    # repeated for them the whole score matrix is written out.
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and (mask is not None or value.dtype == torch.float32):
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    grouped = key.shape[1] < query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def document_positions(documents: Tensor) -> Tensor:
    """Return the position of each token inside its document; `documents` [B, T] holds runs of equal ids."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.zeros_like(places)
    starts[:, 1:] = places[:, 1:] * (documents[:, 1:] != documents[:, :-1])
    return places - starts.cummax(dim=1).values


def document_mask(documents: Tensor) -> Tensor:
    """Return who may look at whom, [B, 1, T, T]: the earlier tokens of its own document. Ids must not come back."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril().unsqueeze(1)
