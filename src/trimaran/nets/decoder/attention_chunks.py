"""Chunked attention (Llama-4): a query attends only to the keys of its own chunk of the document."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.models.layer_variations import TemperatureSpec


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


def query_factors(positions: Tensor, temperature: TemperatureSpec) -> Tensor:
    """Return what queries at `positions` [B, T] are multiplied by, [B, 1, T, 1]: more for late ones."""
    steps = torch.floor((positions.float() + 1.0) / temperature.interval)
    return (torch.log1p(steps) * temperature.scale + 1.0)[:, None, :, None]
