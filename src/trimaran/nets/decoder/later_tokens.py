"""The inputs and targets of multi-token prediction: tokens and labels some places later in the same document."""

import torch
from torch import Tensor

from trimaran.nets.decoder.attention_context import last_indices

IGNORED = -100


def tokens_ahead(tokens: Tensor, documents: Tensor | None, places: int) -> Tensor:
    """Return the token `places` after each of `tokens` [B, T]; where its document has ended, the document's last one.

    Those are never trained, because they have no label. `documents` are numbers as in `Decoder.forward`.
    """
    indices, last = _indices(tokens, documents)
    return tokens.gather(1, torch.minimum(indices + places, last))


def labels_ahead(labels: Tensor, documents: Tensor | None, places: int) -> Tensor:
    """Return the label `places` after each of `labels` [B, T], `IGNORED` where the document of that place has ended."""
    indices, last = _indices(labels, documents)
    found = labels.gather(1, torch.minimum(indices + places, last))
    return found.masked_fill(indices + places > last, IGNORED)


def _indices(tokens: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the index of each token in its row, and that of the last token of its document."""
    indices = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if documents is None:
        return indices, torch.full_like(indices, tokens.shape[1] - 1)
    return indices, last_indices(documents)
