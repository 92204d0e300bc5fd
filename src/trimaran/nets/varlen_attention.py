"""Attention inside documents and images that lie end to end, without a mask of everything against everything."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

HALF = (torch.bfloat16, torch.float16)
# The kernel reads grouped heads as they are; from torch 2.12 on it wants to be told that this is meant.
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
# What a call for one more length costs, forward and backward, in pairs of positions x heads x head_dim: 0.5 ms on one
# core of a CPU (measured), 0.15 ms on a GPU.
CALL = {"cpu": 5 << 19, "cuda": 1 << 28}
CAUSAL = 0.75  # of the time for all pairs, though it is half of them: kernels leave out whole tiles only


@dataclass(frozen=True, eq=False)
class Segments:
    """How rows are cut into parts that do not see each other: documents of a text, or images of a micro-batch.

    `ids` [B, T] are runs of equal numbers, and no number comes back in its row. `bounds` (int32) tell where each part
    begins in the rows laid end to end, and where the last ends; they are there where a kernel can use them. `reach` is
    an empty tensor, as long as a part may be at most: compiled code can be told that a length changes, and takes a
    number for a constant. `lengths` are those of the parts, where the host knows them.
    """

    ids: Tensor
    bounds: Tensor | None
    reach: Tensor
    lengths: tuple[int, ...] | None
    _masks: dict[bool, Tensor] = field(default_factory=dict)

    @classmethod
    def of_documents(cls, documents: Tensor, lengths: Sequence[int] | None = None) -> Self:
        """Return the documents of rows [B, T] of ids. `lengths`, which `run_lengths` tells, spare a GPU a T x T mask.

        They cannot be read off the device without waiting for it, so a batch that is on one needs to bring them along.
        """
        if lengths is None and documents.device.type == "cpu" and not torch.compiler.is_compiling():
            lengths = run_lengths(documents)
        if lengths is None:
            return cls(documents, None, reach_of(documents.shape[1]), None)
        return cls(documents, _bounds(lengths, documents.device), reach_of(max(lengths, default=0)), tuple(lengths))

    @classmethod
    def of_lengths(cls, lengths: Tensor | Sequence[int], total: int, device: torch.device) -> Self:
        """Return one row of `total` positions, cut into parts of these lengths, which may lie on the device."""
        if isinstance(lengths, Tensor) and lengths.device.type != "cpu":
            bounds = _varying(F.pad(lengths.cumsum(0), (1, 0)).int()) if has_flash(device) else None
            return cls(_ids(lengths, total), bounds, reach_of(total), None)
        known = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        ids = _ids(torch.tensor(known, dtype=torch.int64), total).to(device, non_blocking=True)
        return cls(ids, _bounds(known, device), reach_of(max(known, default=0)), tuple(known))

    @property
    def longest(self) -> int:
        return self.reach.shape[0]

    def mask(self, *, causal: bool) -> Tensor:
        """Return who may look at whom, [B, 1, T, T]. Layers share it, but for compiled ones, which make it anew."""
        if torch.compiler.is_compiling():
            return document_mask(self.ids, causal=causal)
        if causal not in self._masks:
            self._masks[causal] = document_mask(self.ids, causal=causal)
        return self._masks[causal]


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, causal: bool, scale: float | None = None
) -> Tensor:
    """Return what each query gathers inside its own segment, all [B, heads, T, head_dim]; keys may have fewer heads.

    Three ways, which agree to rounding: the kernel for sequences of any lengths (CUDA, half precision), a call for each
    length that occurs, and a mask. None of them makes the host wait for the device.
    """
    width = query.shape[-1]
    if segments.bounds is not None and value.dtype in HALF and width % 8 == 0 and width <= 256:
        return _laid_end_to_end(query, key, value, segments, causal=causal, scale=scale)
    lengths = None if torch.compiler.is_compiling() else segments.lengths
    if lengths is not None and _apart_is_cheaper(query, lengths, causal=causal):
        return _apart(query, key, value, lengths, causal=causal, scale=scale)
    return attention(query, key, value, segments.mask(causal=causal), scale=scale)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool = True, scale: float | None = None
) -> Tensor:
    """Return scaled dot-product attention with grouped heads; without a mask it is causal, unless told otherwise."""
    # The flash kernels read grouped heads as they are. Those that take a mask or fp32 do not, and unless the heads are
    # repeated for them the whole score matrix is written out.
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and (mask is not None or value.dtype == torch.float32):
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    grouped = key.shape[1] < query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal and mask is None, scale=scale, enable_gqa=grouped
    )


def document_mask(documents: Tensor, *, causal: bool = True) -> Tensor:
    """Return who may look at whom, [B, 1, T, T]: the tokens of its own document, up to itself if `causal`.

    Ids must not come back.
    """
    same = documents[:, :, None] == documents[:, None, :]
    return (same.tril() if causal else same).unsqueeze(1)


def run_lengths(documents: Tensor) -> tuple[int, ...]:
    """Return how long the runs of equal ids are, row after row. `documents` [B, T] must be on the host."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero().squeeze(1)
    return tuple(torch.diff(starts, append=starts.new_tensor([documents.numel()])).tolist())


def reach_of(longest: int) -> Tensor:
    """Return what tells compiled code how long a part may be."""
    return _varying(torch.empty(longest, 0))


def _varying(tensor: Tensor) -> Tensor:
    """Return the tensor, of which compiled code is told that it will be longer or shorter another time.

    Otherwise it takes the first length for the only one, and is compiled again when it has seen another.
    """
    if "torch._dynamo" in sys.modules and not torch.compiler.is_compiling():
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


@cache
def has_flash(device: torch.device) -> bool:
    """Return whether the device has the kernel for sequences of any lengths."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    if not has_flash(device):
        return None
    return _varying(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True))


def _ids(lengths: Tensor, total: int) -> Tensor:
    numbers = torch.arange(len(lengths), device=lengths.device)
    return numbers.repeat_interleave(lengths.long(), output_size=total)[None]


def _laid_end_to_end(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, causal: bool, scale: float | None
) -> Tensor:
    assert segments.bounds is not None, "the kernel was chosen because they are there"
    places = (segments.bounds, segments.bounds, segments.longest, segments.longest)
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0 if causal else -1), **GROUPED}
    out: Any = varlen_attn(_end_to_end(query), _end_to_end(key), _end_to_end(value), *places, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


def _apart(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], *, causal: bool, scale: float | None
) -> Tensor:
    """Return attention, computed at once for all segments of the same length."""
    alike: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        alike.setdefault(length, []).append(number)
    shape = (query.shape[0], query.shape[2])
    if len(alike) == 1:  # as the tiles of images, or whole rows: nothing needs to be moved
        some = [
            _end_to_end(each).unflatten(0, (len(lengths), lengths[0])).transpose(1, 2) for each in (query, key, value)
        ]
        found = attention(some[0], some[1], some[2], None, causal=causal, scale=scale)
        return _end_to_end(found).unflatten(0, shape).transpose(1, 2)
    parts = [_end_to_end(each).split(lengths) for each in (query, key, value)]
    outs: list[Tensor] = [query] * len(lengths)
    for numbers in alike.values():
        some = [torch.stack([part[number] for number in numbers]).transpose(1, 2) for part in parts]
        found = attention(some[0], some[1], some[2], None, causal=causal, scale=scale).transpose(1, 2)
        for number, out in zip(numbers, found.unbind(), strict=True):
            outs[number] = out
    return torch.cat(outs).unflatten(0, shape).transpose(1, 2)


def _end_to_end(x: Tensor) -> Tensor:
    """Return `x` [B, heads, T, head_dim] with its rows one behind the other, [B * T, heads, head_dim]."""
    return x.transpose(1, 2).flatten(0, 1)


def _apart_is_cheaper(query: Tensor, lengths: tuple[int, ...], *, causal: bool) -> bool:
    """Return whether calls for each length take less time than one with a mask, which looks at every pair."""
    batch, heads, length, width = query.shape
    counts = Counter(lengths)
    pairs = sum(count * each * each for each, count in counts.items()) * (CAUSAL if causal else 1)
    calls = len(counts) * CALL["cuda" if query.is_cuda else "cpu"]
    return calls + heads * width * pairs < heads * width * batch * length * length
