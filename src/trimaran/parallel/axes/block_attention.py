"""Attention of some queries to a block of keys, with what is needed to merge blocks: the log-sum-exp of the scores.

Three implementations: the varlen kernel (CUDA, half precision), torch's kernel for CPUs, and tiles of scores, which
support windows and soft caps on every device. None of them needs more memory than its inputs, except for one tile.
All tensors are [B, heads, positions, head_dim]; keys may have fewer heads than queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.nets import HALF_PRECISION, has_flash
from trimaran.parallel.axes.ring_layout import Rectangle, RingChunks, Span, tiles

aten = torch.ops.aten
MASKED_SCORE = -1e30  # not -inf: a query that attends to no key of a tile must not become NaN


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores follow from queries and keys."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """The rectangles to compute of a reader's queries and an owner's keys, of which `first_key` is the first here."""

    rectangles: tuple[Rectangle, ...]
    ring: RingChunks
    reader: int
    owner: int
    first_key: int = 0

    @property
    def is_causal(self) -> bool:
        return self.reader == self.owner


@dataclass(frozen=True, slots=True)
class QueryState:
    """What backward knows of a rank's queries: output and log-sum-exp over all keys, and the output's gradient."""

    query: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients so far, in fp32."""

    query: Tensor
    key: Tensor
    value: Tensor


class Outputs:
    """The output so far, in fp32, and its log-sum-exp."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        batch, heads, length, _ = query.shape  # positions are before heads in memory, as kernels return outputs
        self.out = query.new_zeros(batch, length, heads, value.shape[-1], dtype=torch.float32).transpose(1, 2)
        self.lse = query.new_full((batch, length, heads), MASKED_SCORE, dtype=torch.float32).transpose(1, 2)

    def merge(self, row: int | None, queries: Span, out: Tensor, lse: Tensor) -> None:
        """Add the output of these queries over other keys."""
        merge_into(_part(self.out, row, queries), _part(self.lse, row, queries), out, lse)

    def add_sinks(self, sinks: Tensor) -> None:
        """Count a score for each head that takes its part of the probability, and has no value."""
        total = torch.logaddexp(self.lse, sinks.float()[None, :, None])
        self.out *= (self.lse - total).exp().unsqueeze(-1)
        self.lse = total


def merge_into(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge the output over other keys into `out` and `lse`, in place."""
    total = torch.logaddexp(lse, other_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(other * (other_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def attention_for(query: Tensor, value: Tensor, scores: Scores) -> "CpuAttention | PackedAttention | TiledAttention":
    """Return the implementation for these tensors; both of its methods add those of a block to a total."""
    width = query.shape[-1]
    is_plain = scores.window is None and not scores.softcap and value.shape[-1] <= width
    if is_plain and query.is_cpu:
        return CpuAttention(scores)
    if is_plain and has_flash(query.device) and value.dtype in HALF_PRECISION and width % 8 == 0 and width <= 256:
        return PackedAttention(scores)
    return TiledAttention(scores)


@dataclass(frozen=True, slots=True)
class CpuAttention:
    """One call of torch's kernel for each rectangle. It needs a key head for each query head."""

    scores: Scores

    def forward(self, total: Outputs, query: Tensor, key: Tensor, value: Tensor, block: KeyBlock) -> None:
        repeats, width = query.shape[1] // key.shape[1], value.shape[-1]
        for each in block.rectangles:
            keys, values = (_repeated(_part(x, each.row, each.keys), repeats) for x in (key, value))
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                _part(query, each.row, each.queries), keys, _as_wide(values, keys), 0.0, block.is_causal,
                scale=self.scores.scale,
            )  # fmt: skip
            total.merge(each.row, each.queries, out[..., :width], lse)

    def backward(self, total: Gradients, given: QueryState, key: Tensor, value: Tensor, block: KeyBlock) -> None:
        repeats, width = given.query.shape[1] // key.shape[1], value.shape[-1]
        for each in block.rectangles:
            keys, values = (_repeated(_part(x, each.row, each.keys), repeats) for x in (key, value))
            query, out, lse, grad = (
                _part(x, each.row, each.queries) for x in (given.query, given.out, given.lse, given.grad)
            )
            found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _as_wide(grad, query), query, keys, _as_wide(values, keys), _as_wide(out, query), lse, 0.0,
                block.is_causal, scale=self.scores.scale,
            )  # fmt: skip
            _part(total.query, each.row, each.queries).add_(found[0])
            _part(total.key, each.row, each.keys).add_(_summed(found[1], repeats))
            _part(total.value, each.row, each.keys).add_(_summed(found[2][..., :width], repeats))


@dataclass(frozen=True, slots=True)
class TiledAttention:
    """Tiles of scores in fp32, which may be limited to a window or soft-capped."""

    scores: Scores

    def forward(self, total: Outputs, query: Tensor, key: Tensor, value: Tensor, block: KeyBlock) -> None:
        for tile, mask in self._tiles(block, query.device):
            keys, values = (_part(x, tile.row, tile.keys).float().unsqueeze(2) for x in (key, value))
            queries = _grouped(_part(query, tile.row, tile.queries), key.shape[1])
            scores = self._scores(queries, keys, mask)[0]
            lse = scores.logsumexp(-1)
            out = (scores - lse.unsqueeze(-1)).exp_() @ values
            total.merge(tile.row, tile.queries, out.flatten(1, 2), lse.flatten(1, 2))

    def backward(self, total: Gradients, given: QueryState, key: Tensor, value: Tensor, block: KeyBlock) -> None:
        heads, product = key.shape[1], (given.grad.float() * given.out.float()).sum(-1, keepdim=True)
        for tile, mask in self._tiles(block, key.device):
            keys, values = (_part(x, tile.row, tile.keys).float().unsqueeze(2) for x in (key, value))
            query, grad, lse, delta = (
                _grouped(_part(x, tile.row, tile.queries), heads)
                for x in (given.query, given.grad, given.lse.unsqueeze(-1), product)
            )
            scores, slope = self._scores(query, keys, mask)
            weights = (scores - lse).exp_()
            of_scores = weights * (grad @ values.transpose(-2, -1) - delta) * self.scores.scale
            of_scores = of_scores if slope is None else of_scores * slope
            _part(total.query, tile.row, tile.queries).add_((of_scores @ keys).flatten(1, 2))
            _part(total.key, tile.row, tile.keys).add_((of_scores.transpose(-2, -1) @ query).sum(2))
            _part(total.value, tile.row, tile.keys).add_((weights.transpose(-2, -1) @ grad).sum(2))

    def _scores(self, query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the scores, and their derivative by those without a soft cap."""
        scores, slope = (query @ key.transpose(-2, -1)) * self.scores.scale, None
        if self.scores.softcap:
            capped = torch.tanh(scores / self.scores.softcap)
            scores, slope = capped * self.scores.softcap, 1 - capped.square()
        return (scores if mask is None else scores.masked_fill(~mask, MASKED_SCORE)), slope

    def _tiles(self, block: KeyBlock, device: torch.device) -> Iterator[tuple[Rectangle, Tensor | None]]:
        ring, ranks, window = block.ring, (block.reader, block.owner), self.scores.window
        for rectangle in block.rectangles:
            for tile, is_masked in tiles(rectangle, ring, ranks, block.first_key, window):
                mask = None
                if is_masked:
                    first, last = (block.first_key + each for each in tile.keys)
                    queries = _positions(ring, block.reader, tile.queries, device)
                    distances = queries[:, None] - _positions(ring, block.owner, (first, last), device)
                    mask = distances >= 0 if window is None else (distances >= 0) & (distances < window)
                yield tile, mask


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """One call of the varlen kernel for all rectangles of a block."""

    scores: Scores

    def forward(self, total: Outputs, query: Tensor, key: Tensor, value: Tensor, block: KeyBlock) -> None:
        if not block.rectangles:
            return
        pack = _pack(block.rectangles, query.shape[0], query.shape[2], key.shape[2], query.device)
        keys, width = _packed(key, pack.keys), value.shape[-1]
        out, lse, *_ = aten._flash_attention_forward(
            _packed(query, pack.queries), keys, _as_wide(_packed(value, pack.keys), keys), pack.query_starts,
            pack.key_starts, pack.most[0], pack.most[1], 0.0, block.is_causal, False, scale=self.scores.scale,
        )  # fmt: skip
        everywhere = [_rows(each) for each in (total.out, total.lse)]
        old_out, old_lse = (each.index_select(0, pack.queries) for each in everywhere)
        merge_into(old_out, old_lse, out[..., :width], lse.transpose(0, 1))
        for each, new in zip(everywhere, (old_out, old_lse), strict=True):
            each.index_copy_(0, pack.queries, new)

    def backward(self, total: Gradients, given: QueryState, key: Tensor, value: Tensor, block: KeyBlock) -> None:
        if not block.rectangles:
            return
        query, width = given.query, value.shape[-1]
        pack = _pack(block.rectangles, query.shape[0], query.shape[2], key.shape[2], query.device)
        queries, keys = _packed(query, pack.queries), _packed(key, pack.keys)
        values = _packed(value, pack.keys)
        out, grad = (_packed(each, pack.queries) for each in (given.out, given.grad))
        lse = given.lse.transpose(1, 2).flatten(0, 1)[pack.queries].transpose(0, 1).contiguous()
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the state of dropout
        found = aten._flash_attention_backward(
            _as_wide(grad, queries), queries, keys, _as_wide(values, keys), _as_wide(out, queries), lse,
            pack.query_starts, pack.key_starts, pack.most[0], pack.most[1], 0.0, block.is_causal, unused, unused,
            scale=self.scores.scale,
        )  # fmt: skip
        _add_rows(total.query, pack.queries, found[0])
        _add_rows(total.key, pack.keys, found[1])
        _add_rows(total.value, pack.keys, found[2][..., :width])


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Where the queries and keys of rectangles are in rows that are concatenated, and the cumulative lengths."""

    queries: Tensor
    keys: Tensor
    query_starts: Tensor
    key_starts: Tensor
    most: tuple[int, int]


@lru_cache(maxsize=128)  # all layers use it
def _pack(rectangles: tuple[Rectangle, ...], rows: int, num_queries: int, num_keys: int, device: torch.device) -> Pack:
    each_row = [(row, each) for each in rectangles for row in (range(rows) if each.row is None else (each.row,))]
    queries = [
        range(row * num_queries + each.queries[0], row * num_queries + each.queries[1]) for row, each in each_row
    ]
    keys = [range(row * num_keys + each.keys[0], row * num_keys + each.keys[1]) for row, each in each_row]
    tensors = []
    for spans in (queries, keys):
        indices = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        starts = F.pad(torch.tensor([len(span) for span in spans]).cumsum(0), (1, 0)).int()
        tensors.append((indices.to(device, non_blocking=True), starts.to(device, non_blocking=True)))
    most = max(map(len, queries)), max(map(len, keys))
    return Pack(tensors[0][0], tensors[1][0], tensors[0][1], tensors[1][1], most)


def _packed(x: Tensor, indices: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1).index_select(0, indices)


def _rows(total: Tensor) -> Tensor:
    """Return a view of all positions, [B * positions, heads, ...], of a tensor that has them first in memory."""
    return total.transpose(1, 2).view(-1, *total.shape[1:2], *total.shape[3:])


def _add_rows(total: Tensor, indices: Tensor, rows: Tensor) -> None:
    _rows(total).index_add_(0, indices, rows.to(total.dtype))


def _part(x: Tensor, row: int | None, span: Span) -> Tensor:
    """Return a view of these positions of one row or of all rows."""
    return (x if row is None else x[row : row + 1])[:, :, slice(*span)]


def _repeated(x: Tensor, repeats: int) -> Tensor:
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def _summed(gradient: Tensor, repeats: int) -> Tensor:
    return gradient if repeats == 1 else gradient.unflatten(1, (-1, repeats)).float().sum(2)


def _grouped(x: Tensor, key_heads: int) -> Tensor:
    """Return queries in fp32 as [B, key heads, queries of each, positions, ...]."""
    return x.float().unflatten(1, (key_heads, -1))


def _as_wide(x: Tensor, other: Tensor) -> Tensor:
    """Return `x` with zeros up to the width of `other`: kernels need one width for keys and values."""
    missing = other.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _positions(ring: RingChunks, rank: int, span: Span, device: torch.device) -> Tensor:
    """Return the positions in the sequence of a rank's local positions."""
    local = torch.arange(*span, device=device)
    back = (2 * ring.num_ranks - 2 - rank) * ring.chunk
    return local + torch.where(local < ring.chunk, rank * ring.chunk, back)
