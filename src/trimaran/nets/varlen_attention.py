"""Attention inside segments of variable length, under a mask, with windows, soft caps or sinks, and flex attention."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from trimaran.core import DEVICE_TRAITS

HALF_PRECISION = (torch.bfloat16, torch.float16)
# The cost of one more attention call, forward and backward, in pairs of positions x heads x head_dim: 0.5 ms on one CPU
# core (measured), 0.15 ms on a GPU.
CALL_COST = {"cpu": 5 << 19, "cuda": 1 << 28}
CAUSAL_COST_FRACTION = 0.75  # of the time of all pairs, though it is half of them: kernels skip complete tiles only
BLOCK = 128  # positions of a tile, of which the kernel leaves out those that are masked completely
MAX_HEAD_DIM = 256
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Segments:
    """The split of rows into segments that do not attend to each other: documents of a text, or images.

    `ids` [B, T] are runs of equal numbers, unique within a row. `cu_seqlens` (int32) are the cumulative lengths over
    all rows, if the device has a kernel that uses them. `max_length_carrier` is a tensor of shape [max length, 0]:
    compiled code can treat a shape as dynamic, but specialises on a Python number. `lengths` are the segments' lengths,
    if the host knows them.
    """

    ids: Tensor
    cu_seqlens: Tensor | None
    max_length_carrier: Tensor
    lengths: tuple[int, ...] | None
    _masks: dict[bool, Tensor] = field(default_factory=dict)
    block_masks: dict[int | None, Any] = field(default_factory=dict)  # of flex attention, by window

    @classmethod
    def of_documents(cls, documents: Tensor, lengths: Sequence[int] | None = None) -> Self:
        """Return the segments of rows [B, T] of document ids. With `lengths` from `run_lengths` a GPU needs no mask.

        Reading the lengths from the device would synchronise with it, so a batch on a device brings them from the host.
        """
        if lengths is None and documents.is_cpu and not torch.compiler.is_compiling():
            lengths = run_lengths(documents)
        if lengths is None:
            return cls(documents, None, max_length_tensor(documents.shape[1]), None)
        return cls(
            documents,
            _cu_seqlens_of(lengths, documents.device),
            max_length_tensor(max(lengths, default=0)),
            tuple(lengths),
        )

    @classmethod
    def of_lengths(cls, lengths: Tensor | Sequence[int], total: int, device: torch.device) -> Self:
        """Return one row of `total` positions, split into segments of these lengths, which may be on the device."""
        if isinstance(lengths, Tensor) and not lengths.is_cpu:
            cu_seqlens = _mark_dynamic(F.pad(lengths.cumsum(0), (1, 0)).int()) if has_flash(device) else None
            return cls(_ids(lengths, total), cu_seqlens, max_length_tensor(total), None)
        host_lengths = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        ids = _ids(torch.tensor(host_lengths, dtype=torch.int64), total).to(device, non_blocking=True)
        max_length = max_length_tensor(max(host_lengths, default=0))
        return cls(ids, _cu_seqlens_of(host_lengths, device), max_length, tuple(host_lengths))

    @property
    def max_length(self) -> int:
        return self.max_length_carrier.shape[0]

    def has_kernel(self, query: Tensor, value: Tensor) -> bool:
        """Return whether the varlen kernel computes heads like these, [B, heads, T, head_dim]."""
        width = query.shape[-1]
        return self.cu_seqlens is not None and value.dtype in HALF_PRECISION and width % 8 == 0 and width <= 256

    def mask(self, *, causal: bool) -> Tensor:
        """Return the attention mask [B, 1, T, T]. Layers share it, except compiled ones, which build it again."""
        if torch.compiler.is_compiling():
            return document_mask(self.ids, causal=causal)
        if causal not in self._masks:
            self._masks[causal] = document_mask(self.ids, causal=causal)
        return self._masks[causal]


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, causal: bool, scale: float | None = None
) -> Tensor:
    """Return attention inside each segment, all [B, heads, T, head_dim]; keys may have fewer heads.

    Three implementations, which agree up to rounding: the varlen kernel (CUDA, half precision), one call for each
    distinct length, and a mask. None of them synchronises with the device.
    """
    if segments.has_kernel(query, value):
        return varlen_attention(query, key, value, segments, (-1, 0 if causal else -1), scale)
    lengths = None if torch.compiler.is_compiling() else segments.lengths
    if lengths is not None and _by_length_is_cheaper(query, lengths, causal=causal):
        return _attention_by_length(query, key, value, lengths, causal=causal, scale=scale)
    return attention(query, key, value, segments.mask(causal=causal), scale=scale)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool = True, scale: float | None = None
) -> Tensor:
    """Return scaled dot-product attention with grouped heads; `causal` applies only without a mask."""
    # The flash kernels support grouped heads. Kernels for a mask or fp32 do not: unless the heads are repeated, the
    # full score matrix is materialised.
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and (mask is not None or value.dtype == torch.float32):
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    grouped = key.shape[1] < query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal and mask is None, scale=scale, enable_gqa=grouped
    )


def document_mask(documents: Tensor, *, causal: bool = True) -> Tensor:
    """Return the mask [B, 1, T, T] of attention inside documents, causal or not. Ids must be unique within a row."""
    same = documents[:, :, None] == documents[:, None, :]
    return (same.tril() if causal else same).unsqueeze(1)


def run_lengths(documents: Tensor) -> tuple[int, ...]:
    """Return the lengths of the runs of equal ids, row after row. `documents` [B, T] must be on the host."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero().squeeze(1)
    return tuple(torch.diff(starts, append=starts.new_tensor([documents.numel()])).tolist())


def max_length_tensor(max_length: int) -> Tensor:
    """Return a tensor whose first dimension is `max_length`, marked as dynamic for compiled code."""
    return _mark_dynamic(torch.empty(max_length, 0))


def _mark_dynamic(tensor: Tensor) -> Tensor:
    """Return the tensor with its first dimension marked as dynamic, so that another length does not recompile."""
    if "torch._dynamo" in sys.modules and not torch.compiler.is_compiling():
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


@cache
def has_flash(device: torch.device) -> bool:
    if not DEVICE_TRAITS[device.type].has_kernels or torch.version.hip:
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def _cu_seqlens_of(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    if not has_flash(device):
        return None
    return _mark_dynamic(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True))


def _ids(lengths: Tensor, total: int) -> Tensor:
    numbers = torch.arange(len(lengths), device=lengths.device)
    return numbers.repeat_interleave(lengths.long(), output_size=total)[None]


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, reach: tuple[int, int], scale: float | None
) -> Tensor:
    """Return attention inside segments; `reach` are the keys before and after a query's own, -1 for all."""
    from trimaran.nets.varlen_kernel import GQA_OPTION, varlen_attn  # noqa: PLC0415  it imports torch's compiler

    assert segments.cu_seqlens is not None, "the caller checks this"
    lengths = (segments.cu_seqlens, segments.cu_seqlens, segments.max_length, segments.max_length)
    options: dict[str, Any] = {"scale": scale, "window_size": reach, **GQA_OPTION}
    missing = query.shape[-1] - value.shape[-1]
    padded = F.pad(value, (0, missing)) if missing else value  # latent attention has values narrower than keys
    out: Any = varlen_attn(_end_to_end(query), _end_to_end(key), _end_to_end(padded), *lengths, **options)
    out = out[..., : value.shape[-1]] if missing else out
    return out.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


def _attention_by_length(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], *, causal: bool, scale: float | None
) -> Tensor:
    """Return attention with one call for all segments of the same length."""
    numbers_by_length: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        numbers_by_length.setdefault(length, []).append(number)
    shape = (query.shape[0], query.shape[2])
    if len(numbers_by_length) == 1:  # such as tiles of images, or full rows: nothing needs to be copied
        same = [
            _end_to_end(each).unflatten(0, (len(lengths), lengths[0])).transpose(1, 2) for each in (query, key, value)
        ]
        out = attention(same[0], same[1], same[2], None, causal=causal, scale=scale)
        return _end_to_end(out).unflatten(0, shape).transpose(1, 2)
    parts = [_end_to_end(each).split(lengths) for each in (query, key, value)]
    outs: list[Tensor] = [query] * len(lengths)
    for numbers in numbers_by_length.values():
        same = [torch.stack([part[number] for number in numbers]).transpose(1, 2) for part in parts]
        stacked = attention(same[0], same[1], same[2], None, causal=causal, scale=scale).transpose(1, 2)
        for number, out in zip(numbers, stacked.unbind(), strict=True):
            outs[number] = out
    return torch.cat(outs).unflatten(0, shape).transpose(1, 2)


def _end_to_end(x: Tensor) -> Tensor:
    """Return `x` [B, heads, T, head_dim] with its rows concatenated, [B * T, heads, head_dim]."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_length_is_cheaper(query: Tensor, lengths: tuple[int, ...], *, causal: bool) -> bool:
    """Return whether one call for each length is faster than one call with a mask, which computes every pair."""
    batch, heads, length, width = query.shape
    counts = Counter(lengths)
    pairs = sum(count * each * each for each, count in counts.items()) * (CAUSAL_COST_FRACTION if causal else 1)
    calls = len(counts) * CALL_COST["cuda" if query.is_cuda else "cpu"]
    return calls + heads * width * pairs < heads * width * batch * length * length


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


def has_flex_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether flex attention computes heads like these, [B, heads, T, head_dim], faster than a mask."""
    length, width = query.shape[2:]
    fits = length % BLOCK == 0 and 16 <= width <= MAX_HEAD_DIM and value.dtype in HALF_PRECISION
    return query.is_cuda and not torch.version.hip and fits


def flexible_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments | None, options: AttentionOptions
) -> Tensor:
    """Return causal attention inside each segment, all [B, heads, T, head_dim]; keys may have fewer heads.

    A sink takes its part of the probability and has no value: the output is multiplied by the part of the keys.
    """
    compiling = torch.compiler.is_compiling()
    soft_cap = soft_cap_function if compiling else _shared_soft_cap
    settings: dict[str, Any] = {
        "score_mod": soft_cap(options.softcap) if options.softcap else None,
        "block_mask": _block_mask_of(query, segments, options.window),
        "scale": options.scale,
        "enable_gqa": key.shape[1] < query.shape[1],
    }
    attend = flex_attention if compiling or not query.is_cuda else _compiled()
    if options.sinks is None:
        return attend(query, key, value, **settings)  # pyrefly: ignore[bad-return]
    out, aux = attend(query, key, value, **settings, return_aux=AuxRequest(lse=True))
    kept = torch.sigmoid(aux.lse - options.sinks.float()[:, None])
    return (out * kept.unsqueeze(-1)).to(value.dtype)


def block_mask(ids: Tensor | None, length: int, window: int | None, device: torch.device) -> BlockMask:
    """Return which earlier keys of its segment and window each query sees, found by the segments at blocks' ends."""
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
        return _shared_block_mask(None, length, window, device)
    if window not in segments.block_masks:
        segments.block_masks[window] = block_mask(segments.ids, length, window, device)
    return segments.block_masks[window]


_shared_block_mask = lru_cache(maxsize=8)(block_mask)


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
