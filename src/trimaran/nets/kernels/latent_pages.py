"""Attention over the pages of latent attention, for CUDA devices: all query heads attend to one narrow head.

Pages of a layer are [pages, page_size, 1, rank + rope]: the latent vector of a token, and the rotated features that the
keys of all heads share. Queries [tokens, heads, rank + rope] have absorbed the weight that makes keys, see
`LatentHeads`. The key is all that a page has of a token, the value is its latent vector, which is read once for both.
What `paged_attention` says of shapes, tables and the order of queries holds here, too.
"""

from typing import NamedTuple

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

from trimaran.nets.kernels.paged_attention import (
    LOG2_E,
    MIN_ROWS,
    MIN_SPLIT_KEYS,
    _accumulated,
    _merge,
    _sequence_of,
    num_splits,
)
from trimaran.nets.paged_cache import PagedExtension
from trimaran.nets.varlen_attention import AttentionOptions

LARGE_SHARED_BYTES = 200 * 1024  # that a program may use: of an H100 and its successors 227 KiB, of an A100 163 KiB


def attend_latent_pages(
    query: Tensor, pages: Tensor, extension: PagedExtension, options: AttentionOptions, *, rank: int
) -> Tensor:
    """Return what queries [heads, N, rank + rope] attend to, [heads, N, rank]. New tokens are in their pages.

    The queries are those of the `num_decodes` sequences with one new token. If there are none, the step is that of a
    CUDA graph, where only the device knows which these are, and the queries are those of all tokens.
    """
    queries, decodes = query.transpose(0, 1), extension.num_decodes
    tables, lengths = extension.page_tables, extension.context_lengths
    out = torch.empty(*queries.shape[:2], rank, dtype=query.dtype, device=query.device)
    if decodes:
        attend_one_latent_query(queries, pages, tables[:decodes], lengths[:decodes], options, out=out)
    else:
        starts = extension.query_starts
        out.zero_()
        attend_one_latent_query(queries, pages, tables, lengths, options, out=out, starts=starts)
        # Sequences with more than one query: a query attends up to its own key. See `attend_several_queries`.
        (tokens, heads, _), tile = out.shape, _tile(queries)
        queries = queries if queries.stride(-1) == 1 else queries.contiguous()
        group = min(heads, tile.max_rows)
        block = tile.max_rows // group
        with torch.cuda.device(out.device):
            _attend_several_latent_queries[(triton.cdiv(heads, group), tokens // block + len(lengths))](
                queries, pages, tables, lengths, starts, out, _scale(queries, options), len(lengths), tables.stride(0),
                *queries.stride()[:2], **_shape(queries, pages, rank, options),
                HEADS=heads, GROUP=group, ROWS=tile.max_rows, QUERIES=block, KEYS=tile.keys,
                num_warps=8 if tile.max_rows > MIN_ROWS else 4, num_stages=tile.stages,
            )  # fmt: skip
    return out.transpose(0, 1)


def attend_one_latent_query(
    query: Tensor,
    pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    options: AttentionOptions,
    *,
    out: Tensor,
    starts: Tensor | None = None,
) -> None:
    """Write what one query of each sequence attends to, to `out` [sequences, heads, rank]: see `attend_one_query`."""
    count, (_, heads, rank) = len(lengths), out.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    shape, tile = _shape(query, pages, rank, options), _tile(query)
    rows = max(MIN_ROWS, min(tile.max_rows, triton.next_power_of_2(heads)))
    blocks = triton.cdiv(heads, rows)
    splits = num_splits(count * blocks, query.device)
    parts = out if splits == 1 else torch.empty(count, heads, splits, rank, device=out.device)
    sums = torch.empty(count, heads, splits, device=out.device)
    with torch.cuda.device(out.device):
        _attend_one_latent_query[(blocks, count, splits)](
            query, pages, tables, lengths, lengths if starts is None else starts, parts, sums,
            _scale(query, options), tables.stride(0), *query.stride()[:2], **shape,
            HEADS=heads, ROWS=rows, KEYS=tile.keys, SPLITS=splits, MIN_SPLIT=MIN_SPLIT_KEYS,
            ANY_COUNT=starts is not None, num_warps=8 if rows > MIN_ROWS else 4, num_stages=tile.stages,
        )  # fmt: skip
        if splits > 1:
            _merge[(count, heads)](
                parts, sums, lengths if starts is None else starts, out,
                HEAD_DIM=rank, PADDED_DIM=shape["PADDED_RANK"], SPLITS=splits, ANY_COUNT=starts is not None,
                num_warps=8,
            )  # fmt: skip


def _shape(query: Tensor, pages: Tensor, rank: int, options: AttentionOptions) -> dict[str, int]:
    rope = query.shape[-1] - rank
    return {
        "RANK": rank, "PADDED_RANK": max(MIN_ROWS, triton.next_power_of_2(rank)),
        "ROPE": rope, "PADDED_ROPE": max(MIN_ROWS, triton.next_power_of_2(rope)),
        "PAGE_SIZE": pages.shape[1], "WINDOW": options.window or 0,
    }  # fmt: skip


def _scale(query: Tensor, options: AttentionOptions) -> float:
    return query.shape[-1] ** -0.5 if options.scale is None else options.scale


class LatentTile(NamedTuple):
    """What a program holds at a time: query rows, at most, and keys; and the stages that the compiler pipelines."""

    max_rows: int
    keys: int
    stages: int


def _tile(query: Tensor) -> LatentTile:
    """Return the tile for a device and dtype. With 512 + 64 features and 2 bytes, 64 rows take 181 KiB, 16 take 92.

    With the smaller tile they are 55 KiB. A loop of five stages copies the next keys while it computes; with three it
    only knows their pages. In fp32 products are exact, without tensor cores.
    """
    if query.dtype.itemsize > 2:
        return LatentTile(MIN_ROWS, 16, 2)
    properties = torch.cuda.get_device_properties(query.device)
    shared = properties.shared_memory_per_block_optin  # pyrefly: ignore[missing-attribute] - not in torch's stub
    return LatentTile(64, 32, 5) if shared >= LARGE_SHARED_BYTES else LatentTile(MIN_ROWS, 32, 3)


@triton.jit
def _attended(
    rows, rotated, pages, table, first, last, own, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr, ROPE: tl.constexpr,  # noqa: N803
    PADDED_ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Return the largest score, the sum of weights and the weighted sum of latent vectors, for keys `first` to `last`.

    Query rows are the absorbed part `rows` [ROWS, PADDED_RANK] and the part `rotated` [ROWS, PADDED_ROPE]; `own` [ROWS]
    are their positions.
    """
    dim, rope_dim = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROPE)
    dim_mask, rope_mask = dim < RANK, rope_dim < ROPE
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, PADDED_RANK], tl.float32)
    for start in range(first, last, KEYS):
        position = start + tl.arange(0, KEYS)
        inside = position < last
        page = tl.load(table + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        place = (page * PAGE_SIZE + position % PAGE_SIZE) * (RANK + ROPE)
        narrow = tl.load(pages + place[:, None] + dim[None, :], mask=inside[:, None] & dim_mask[None, :], other=0.0)
        shared = tl.load(
            pages + place[:, None] + RANK + rope_dim[None, :], mask=inside[:, None] & rope_mask[None, :], other=0.0
        )
        scores = tl.dot(rows, tl.trans(narrow), input_precision="ieee")
        scores = tl.dot(rotated, tl.trans(shared), scores, input_precision="ieee")
        seen = inside[None, :] & (position[None, :] <= own[:, None])
        if WINDOW > 0:
            seen = seen & (position[None, :] > own[:, None] - WINDOW)
        scores = tl.where(seen, scores * (scale * LOG2_E), float("-inf"))
        largest, total, out = _accumulated(scores, narrow, largest, total, out)
    return largest, total, out


@triton.jit(do_not_specialize=["table_stride"])
def _attend_one_latent_query(
    query, pages, tables, lengths, starts, parts, sums, scale, table_stride, query_token, query_head,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, ROPE: tl.constexpr, PADDED_ROPE: tl.constexpr,  # noqa: N803
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr, SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, ANY_COUNT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    block, sequence, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    token, skipped = sequence, sequence < 0
    if ANY_COUNT:
        token = tl.load(starts + sequence).to(tl.int64)
        skipped = tl.load(starts + sequence + 1).to(tl.int64) != token + 1
    if skipped:
        return
    length = tl.load(lengths + sequence).to(tl.int32)
    begin = tl.maximum(0, length - WINDOW) if WINDOW > 0 else 0
    each = tl.maximum(MIN_SPLIT, tl.cdiv(tl.cdiv(length - begin, SPLITS), KEYS) * KEYS)
    first = begin + split * each
    last = tl.minimum(first + each, length)

    row, dim, rope_dim = tl.arange(0, ROWS), tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROPE)
    head = block * ROWS + row
    row_mask = head < HEADS
    both = row_mask[:, None] & (dim < RANK)[None, :]
    at_sums = sums + (sequence * HEADS + head) * SPLITS + split
    row_of_parts = token if SPLITS == 1 else sequence
    at_parts = parts + ((row_of_parts * HEADS + head[:, None]) * SPLITS + split) * RANK + dim[None, :]
    if first >= last:
        tl.store(at_sums, tl.full([ROWS], float("-inf"), tl.float32), mask=row_mask)
        if SPLITS == 1:  # padding
            tl.store(at_parts, tl.zeros([ROWS, PADDED_RANK], parts.dtype.element_ty), mask=both)
        return

    at_rows = query + token * query_token + head[:, None] * query_head
    rows = tl.load(at_rows + dim[None, :], mask=both, other=0.0)
    rotated = tl.load(
        at_rows + RANK + rope_dim[None, :], mask=row_mask[:, None] & (rope_dim < ROPE)[None, :], other=0.0
    )
    own = tl.full([ROWS], 0, tl.int32) + (length - 1)
    largest, total, out = _attended(
        rows, rotated, pages, tables + sequence * table_stride, first, last, own, scale,
        ROWS, KEYS, RANK, PADDED_RANK, ROPE, PADDED_ROPE, PAGE_SIZE, WINDOW,
    )  # fmt: skip
    tl.store(at_sums, largest + tl.log2(total), mask=row_mask)
    tl.store(at_parts, (out / total[:, None]).to(parts.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["num_sequences", "table_stride"])
def _attend_several_latent_queries(
    query, pages, tables, lengths, starts, output, scale, num_sequences, table_stride, query_token, query_head,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, ROPE: tl.constexpr, PADDED_ROPE: tl.constexpr,  # noqa: N803
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    group, block = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of(block, starts, num_sequences, QUERIES)
    start_of_sequence = tl.load(starts + sequence).to(tl.int32)
    count = tl.load(starts + sequence + 1).to(tl.int32) - start_of_sequence
    first_query = (block - start_of_sequence // QUERIES - sequence) * QUERIES
    if (first_query >= count) | (count < 2):
        return
    before = tl.load(lengths + sequence).to(tl.int32) - count  # the position of the sequence's first query

    row, dim, rope_dim = tl.arange(0, ROWS), tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROPE)
    number = first_query + row // GROUP
    head = group * GROUP + row % GROUP
    row_mask = (row < QUERIES * GROUP) & (number < count) & (head < HEADS)
    both = row_mask[:, None] & (dim < RANK)[None, :]
    token = (start_of_sequence + number).to(tl.int64)
    at_rows = query + token[:, None] * query_token + head[:, None] * query_head
    rows = tl.load(at_rows + dim[None, :], mask=both, other=0.0)
    rotated = tl.load(
        at_rows + RANK + rope_dim[None, :], mask=row_mask[:, None] & (rope_dim < ROPE)[None, :], other=0.0
    )
    begin = tl.maximum(0, before + first_query - WINDOW + 1) if WINDOW > 0 else 0
    last = before + tl.minimum(first_query + QUERIES, count)
    _, total, out = _attended(
        rows, rotated, pages, tables + sequence.to(tl.int64) * table_stride, begin, last, before + number, scale,
        ROWS, KEYS, RANK, PADDED_RANK, ROPE, PADDED_ROPE, PAGE_SIZE, WINDOW,
    )  # fmt: skip
    at = output + (token[:, None] * HEADS + head[:, None]) * RANK + dim[None, :]
    tl.store(at, (out / tl.where(total == 0.0, 1.0, total)[:, None]).to(output.dtype.element_ty), mask=both)
