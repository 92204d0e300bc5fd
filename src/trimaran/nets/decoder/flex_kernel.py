"""Attention with a soft cap or sinks on a GPU, by torch's flex attention: it stores no scores."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from trimaran.nets.decoder.varlen_attention import HALF_PRECISION, Segments

BLOCK = 128  # positions of a tile, of which the kernel leaves out those that are masked completely
MAX_HEAD_DIM = 256

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def has_flex_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether flex attention computes heads like these, [B, heads, T, head_dim], faster than a mask."""
    length, width = query.shape[2:]
    fits = length % BLOCK == 0 and 16 <= width <= MAX_HEAD_DIM and value.dtype in HALF_PRECISION
    return query.is_cuda and not torch.version.hip and fits


def flexible_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments | None,
    *,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Return causal attention inside each segment, all [B, heads, T, head_dim]; keys may have fewer heads.

    A sink takes its part of the probability and has no value: the output is multiplied by the part of the keys.
    """
    compiling = torch.compiler.is_compiling()
    soft_cap = soft_cap_function if compiling else _shared_soft_cap
    options: dict[str, Any] = {
        "score_mod": soft_cap(softcap) if softcap else None,
        "block_mask": _block_mask_of(query, segments, window),
        "scale": scale,
        "enable_gqa": key.shape[1] < query.shape[1],
    }
    attend = flex_attention if compiling or not query.is_cuda else _compiled()
    if sinks is None:
        return attend(query, key, value, **options)  # pyrefly: ignore[bad-return]
    out, aux = attend(query, key, value, **options, return_aux=AuxRequest(lse=True))
    kept = torch.sigmoid(aux.lse - sinks.float()[:, None])
    return (out * kept.unsqueeze(-1)).to(value.dtype)


def block_mask(ids: Tensor | None, length: int, window: int | None, device: torch.device) -> BlockMask:
    """Return which keys each query attends to: earlier ones of its own segment and window. `ids` are as in `Segments`.

    The tiles are found from the first and last segment of each block of positions, not from every pair.
    """
    first = torch.arange(0, length, BLOCK, device=device)
    distance = first[:, None] - first[None, :]  # of the queries' block from that of the keys
    some, every = distance >= 0, distance > 0
    if window is not None:
        some, every = some & (distance - BLOCK + 1 < window), every & (distance + BLOCK - 1 < window)
    some, every, runs = some[None, None], every[None, None], None
    if ids is not None:
        runs = torch.nn.functional.pad((ids[:, 1:] != ids[:, :-1]).int(), (1, 0)).cumsum(1)  # they never decrease
        low, high = (runs.view(len(runs), -1, BLOCK)[:, None, :, each] for each in (0, -1))
        some = some & (high[..., None, :] >= low[..., :, None])
        every = every & (low[..., None, :] == high[..., :, None])
    partial = some & ~every
    return BlockMask.from_kv_blocks(
        *_ordered(partial), *_ordered(every & some), BLOCK, _mask_function(runs, window), seq_lengths=(length, length)
    )


def _block_mask_of(query: Tensor, segments: Segments | None, window: int | None) -> BlockMask:
    """Return the mask of these queries. Layers share it, except compiled ones, which build it again."""
    length, device = query.shape[2], query.device
    if torch.compiler.is_compiling():
        return block_mask(None if segments is None else segments.ids, length, window, device)
    if segments is None:
        return _causal_blocks(length, window, device)
    if window not in segments.block_masks:
        segments.block_masks[window] = block_mask(segments.ids, length, window, device)
    return segments.block_masks[window]


@lru_cache(maxsize=8)
def _causal_blocks(length: int, window: int | None, device: torch.device) -> BlockMask:
    return block_mask(None, length, window, device)


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of tiles in each row, and their columns first."""
    columns = torch.argsort(tiles.int(), dim=-1, descending=True, stable=True)
    return tiles.sum(-1).int().contiguous(), columns.int().contiguous()


def _mask_function(runs: Tensor | None, window: int | None) -> MaskFunction:
    def causal(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        seen = seen if window is None else seen & (query - key < window)
        return seen if runs is None else seen & (runs[row, query] == runs[row, key])

    return causal


def soft_cap_function(cap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


_shared_soft_cap = cache(soft_cap_function)  # one function for each cap, so that layers share a compilation


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)
