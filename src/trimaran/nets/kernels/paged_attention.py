"""Attention over the pages of a key-value cache, and the store of new keys and values in them, for CUDA devices.

Shapes are static and nothing is read back to the host, so a CUDA graph can capture every function here. Pages of a
layer are [pages, page_size, kv_heads, head_dim]; a sequence's table has its page numbers in order. In the queries
[tokens, heads, head_dim], those of a sequence are consecutive and the last ones of its context.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

from trimaran.nets.paged_cache import PagedExtension
from trimaran.nets.varlen_attention import AttentionOptions

MIN_ROWS = 16  # of a matmul on tensor cores
MAX_SPLITS = 64
MIN_SPLIT_KEYS = 256
PROGRAMS_PER_SM = 8  # that the keys are split into: fewer leave an SM idle while the longest sequence is read
LOG2_E = tl.constexpr(1.4426950408889634)


def store_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    memory: tuple[Tensor, Tensor],
    extension: PagedExtension,
    options: AttentionOptions,
) -> Tensor:
    """Store the new keys and values, and return the attention output, all [1, heads, N, head_dim]."""
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    tokens, kv_heads, head_dim = keys.shape
    keys, values = (each if each.stride(-1) == 1 else each.contiguous() for each in (keys, values))
    block = triton.next_power_of_2(kv_heads * head_dim)
    with torch.cuda.device(keys.device):
        _store[(tokens,)](
            keys, values, *memory, extension.slots, *keys.stride()[:2], *values.stride()[:2],
            HEAD_DIM=head_dim, WIDTH=kv_heads * head_dim, BLOCK=block, num_warps=max(1, min(8, block // 256)),
        )  # fmt: skip
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    decodes, tables, lengths = extension.num_decodes, extension.page_tables, extension.context_lengths
    if not extension.key_lengths and decodes < len(lengths):  # a CUDA graph: only the device knows which have one query
        starts = extension.query_starts
        out.zero_()
        attend_one_query(queries, memory, tables, lengths, options, out=out, starts=starts)
        attend_several_queries(queries, memory, tables, lengths, starts, options, out=out, skip_single=True)
        return out.transpose(0, 1)[None]
    if decodes:
        attend_one_query(queries[:decodes], memory, tables[:decodes], lengths[:decodes], options, out=out[:decodes])
    if decodes < len(lengths):
        starts = extension.query_starts
        if decodes:  # sequences with one query are the first
            if "chunk_starts" not in extension.shared:
                extension.shared["chunk_starts"] = starts[decodes:] - starts[decodes]
            starts = extension.shared["chunk_starts"]
        attend_several_queries(
            queries[decodes:], memory, tables[decodes:], lengths[decodes:], starts, options, out=out[decodes:]
        )
    return out.transpose(0, 1)[None]


def attend_one_query(
    query: Tensor,
    memory: tuple[Tensor, Tensor],
    tables: Tensor,
    lengths: Tensor,
    options: AttentionOptions,
    *,
    out: Tensor,
    starts: Tensor | None = None,
) -> None:
    """Write the attention output of one query for each sequence to `out` [sequences, heads, head_dim], contiguous.

    `tables` are [sequences, pages]; `lengths` [sequences] are the keys of each, the query's own included. A sequence of
    length 0 is padding: its output is zero. Keys are split between programs, so that few sequences with long contexts
    use the whole GPU; a second kernel then merges the parts. With `starts`, see `attend_several_queries`, sequences may
    have any number of queries, and those with one are computed.
    """
    count, (_, heads, head_dim), kv_heads = len(lengths), query.shape, memory[0].shape[2]
    query = query if query.stride(-1) == 1 else query.contiguous()
    splits = num_splits(count * kv_heads, query.device)
    parts = out if splits == 1 else torch.empty(count, heads, splits, head_dim, device=out.device)
    sums = torch.empty(count, heads, splits, device=out.device)
    group, padded_dim = heads // kv_heads, max(MIN_ROWS, triton.next_power_of_2(head_dim))
    with torch.cuda.device(out.device):
        _attend_one_query[(count, kv_heads, splits)](
            query, *memory, tables, lengths, lengths if starts is None else starts, parts, sums,
            *_score_arguments(options, query), tables.stride(0), *query.stride()[:2], **_score_options(options),
            HEADS=heads, GROUP=group, ROWS=max(MIN_ROWS, triton.next_power_of_2(group)),
            HEAD_DIM=head_dim, PADDED_DIM=padded_dim, PAGE_SIZE=memory[0].shape[1], KV_HEADS=kv_heads,
            KEYS=2 * _keys_per_block(query.dtype, padded_dim), SPLITS=splits, MIN_SPLIT=MIN_SPLIT_KEYS,
            ANY_COUNT=starts is not None,
            num_warps=4, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            _merge[(count, heads)](
                parts, sums, lengths if starts is None else starts, out,
                HEAD_DIM=head_dim, PADDED_DIM=padded_dim, SPLITS=splits, ANY_COUNT=starts is not None, num_warps=4,
            )  # fmt: skip


def attend_several_queries(
    query: Tensor,
    memory: tuple[Tensor, Tensor],
    tables: Tensor,
    lengths: Tensor,
    starts: Tensor,
    options: AttentionOptions,
    *,
    out: Tensor,
    skip_single: bool = False,
) -> None:
    """Write the attention output of all queries to `out` [tokens, heads, head_dim]; a query attends up to its own key.

    The queries of sequence i are those from `starts[i]` to `starts[i + 1]`. The rest is as in `attend_one_query`, but
    keys are not split. `skip_single`: sequences with one query are not computed.
    """
    (tokens, heads, head_dim), kv_heads = query.shape, memory[0].shape[2]
    query = query if query.stride(-1) == 1 else query.contiguous()
    group, padded_dim = heads // kv_heads, max(MIN_ROWS, triton.next_power_of_2(head_dim))
    rows = max(triton.next_power_of_2(group), 128 if query.dtype.itemsize == 2 and padded_dim <= 128 else 64)
    block = rows // group
    with torch.cuda.device(out.device):
        _attend_several_queries[(tokens // block + len(lengths), kv_heads)](
            query, *memory, tables, lengths, starts, out, *_score_arguments(options, query),
            len(lengths), tables.stride(0), *query.stride()[:2], **_score_options(options),
            HEADS=heads, GROUP=group, ROWS=rows, QUERIES=block, MIN_QUERIES=2 if skip_single else 1,
            HEAD_DIM=head_dim, PADDED_DIM=padded_dim, PAGE_SIZE=memory[0].shape[1], KV_HEADS=kv_heads,
            KEYS=_keys_per_block(query.dtype, padded_dim), num_warps=8 if rows >= 128 else 4, num_stages=2,
        )  # fmt: skip


def num_splits(programs: int, device: torch.device) -> int:
    """Return into how many parts the keys are split, at most, if there are so many programs without a split."""
    wanted = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(MAX_SPLITS, 1 << (max(1, wanted // programs).bit_length() - 1)))


def _keys_per_block(dtype: torch.dtype, padded_dim: int) -> int:
    return 64 if dtype.itemsize * padded_dim <= 256 else 32  # what fits into shared memory twice or three times


def _score_arguments(options: AttentionOptions, query: Tensor) -> tuple[Tensor, float]:
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    return query if options.sinks is None else options.sinks.contiguous(), scale


def _score_options(options: AttentionOptions) -> dict[str, bool | int | float]:
    window, softcap = options.window or 0, float(options.softcap or 0.0)
    return {"SINKS": options.sinks is not None, "WINDOW": window, "SOFTCAP": softcap}


@triton.jit
def _store(
    key, value, key_pages, value_pages, slots, key_token, key_head, value_token, value_head,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    head, dim = column // HEAD_DIM, column % HEAD_DIM
    new_key = tl.load(key + token * key_token + head * key_head + dim, mask=mask)
    new_value = tl.load(value + token * value_token + head * value_head + dim, mask=mask)
    tl.store(key_pages + slot * WIDTH + column, new_key.to(key_pages.dtype.element_ty), mask=mask)
    tl.store(value_pages + slot * WIDTH + column, new_value.to(value_pages.dtype.element_ty), mask=mask)


@triton.jit
def _scores(rows, keys, scale, SOFTCAP: tl.constexpr):  # noqa: N803
    """Return the scores of query rows [ROWS, dim] and keys [dim, KEYS], in base 2: exp2 of them are the weights."""
    scores = tl.dot(rows, keys, input_precision="ieee") * scale
    if SOFTCAP > 0.0:
        scores = SOFTCAP * (2.0 * tl.sigmoid(2.0 * scores / SOFTCAP) - 1.0)  # tanh
    return scores * LOG2_E


@triton.jit
def _accumulated(scores, values, largest, total, out):
    """Return the running maximum, sum of weights and weighted sum of values, with these scores and values added."""
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row whose keys were all masked so far
    weights = tl.exp2(scores - finite[:, None])
    correction = tl.exp2(largest - finite)
    total = total * correction + tl.sum(weights, axis=1)
    out = out * correction[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_largest, total, out


@triton.jit(do_not_specialize=["table_stride"])
def _attend_one_query(
    query, key_pages, value_pages, tables, lengths, starts, parts, sums, sinks, scale, table_stride,
    query_token, query_head,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr,  # noqa: N803
    ANY_COUNT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
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

    row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    head = kv_head * GROUP + row
    row_mask, dim_mask = row < GROUP, dim < HEAD_DIM
    at_sums = sums + (sequence * HEADS + head) * SPLITS + split
    row_of_parts = token if SPLITS == 1 else sequence
    at_parts = parts + ((row_of_parts * HEADS + head[:, None]) * SPLITS + split) * HEAD_DIM + dim[None, :]
    both = row_mask[:, None] & dim_mask[None, :]
    if first >= last:
        tl.store(at_sums, tl.full([ROWS], float("-inf"), tl.float32), mask=row_mask)
        if SPLITS == 1:  # padding
            tl.store(at_parts, tl.zeros([ROWS, PADDED_DIM], parts.dtype.element_ty), mask=both)
        return

    rows = tl.load(query + token * query_token + head[:, None] * query_head + dim[None, :], mask=both, other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # noqa: SIM102 - the first is decided when the kernel is compiled
        if split == 0:
            largest = tl.load(sinks + head, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
            total = tl.full([ROWS], 1.0, tl.float32)
    out = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for start in range(first, last, KEYS):
        position = start + tl.arange(0, KEYS)
        inside = position < last
        page = tl.load(tables + sequence * table_stride + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        place = ((page * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        keys = tl.load(key_pages + place[None, :] + dim[:, None], mask=inside[None, :] & dim_mask[:, None], other=0.0)
        scores = tl.where(inside[None, :], _scores(rows, keys, scale, SOFTCAP), float("-inf"))
        values = tl.load(
            value_pages + place[:, None] + dim[None, :], mask=inside[:, None] & dim_mask[None, :], other=0.0
        )
        largest, total, out = _accumulated(scores, values, largest, total, out)
    tl.store(at_sums, largest + tl.log2(total), mask=row_mask)
    tl.store(at_parts, (out / total[:, None]).to(parts.dtype.element_ty), mask=both)


@triton.jit
def _merge(
    parts, sums, starts, out,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SPLITS: tl.constexpr, ANY_COUNT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    token, skipped = sequence, sequence < 0
    if ANY_COUNT:
        token = tl.load(starts + sequence).to(tl.int64)
        skipped = tl.load(starts + sequence + 1).to(tl.int64) != token + 1
    if skipped:
        return
    heads, head = tl.num_programs(1), tl.program_id(1)
    at = sequence * heads + head
    split, dim = tl.arange(0, SPLITS), tl.arange(0, PADDED_DIM)
    dim_mask = dim < HEAD_DIM
    each = tl.load(sums + at * SPLITS + split)
    largest = tl.max(each, axis=0)
    weights = tl.exp2(each - tl.where(largest == float("-inf"), 0.0, largest))
    used = each > float("-inf")  # the part of an empty split was not written
    part = tl.load(
        parts + (at * SPLITS + split[:, None]) * HEAD_DIM + dim[None, :],
        mask=used[:, None] & dim_mask[None, :],
        other=0.0,
    )
    total = tl.sum(weights, axis=0)
    merged = tl.sum(part * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (token * heads + head) * HEAD_DIM + dim, merged.to(out.dtype.element_ty), mask=dim_mask)


@triton.jit
def _sequence_of(block, starts, num_sequences, QUERIES: tl.constexpr):  # noqa: N803
    """Return the sequence of a block of queries. A sequence's first block is its start // QUERIES + its number."""
    low, high = 0, num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle).to(tl.int32) // QUERIES + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_sequences", "table_stride"])
def _attend_several_queries(
    query, key_pages, value_pages, tables, lengths, starts, output, sinks, scale, num_sequences, table_stride,
    query_token, query_head,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, QUERIES: tl.constexpr, MIN_QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr,  # noqa: N803
    PADDED_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, KEYS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    block, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of(block, starts, num_sequences, QUERIES)
    start_of_sequence = tl.load(starts + sequence).to(tl.int32)
    count = tl.load(starts + sequence + 1).to(tl.int32) - start_of_sequence
    first_query = (block - start_of_sequence // QUERIES - sequence) * QUERIES
    if (first_query >= count) | (count < MIN_QUERIES):
        return
    before = tl.load(lengths + sequence).to(tl.int32) - count  # the position of the sequence's first query

    row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    number = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_mask, dim_mask = (row < QUERIES * GROUP) & (number < count), dim < HEAD_DIM
    both = row_mask[:, None] & dim_mask[None, :]
    token = (start_of_sequence + number).to(tl.int64)
    rows = tl.load(
        query + token[:, None] * query_token + head[:, None] * query_head + dim[None, :], mask=both, other=0.0
    )
    own = before + number  # the position of each query

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        largest = tl.load(sinks + head, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full([ROWS], 1.0, tl.float32)
    out = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    begin = tl.maximum(0, before + first_query - WINDOW + 1) if WINDOW > 0 else 0
    last = before + tl.minimum(first_query + QUERIES, count)
    table = tables + sequence.to(tl.int64) * table_stride
    for start in range(begin, last, KEYS):
        position = start + tl.arange(0, KEYS)
        inside = position < last
        page = tl.load(table + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        place = ((page * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        keys = tl.load(key_pages + place[None, :] + dim[:, None], mask=inside[None, :] & dim_mask[:, None], other=0.0)
        seen = position[None, :] <= own[:, None]
        if WINDOW > 0:
            seen = seen & (position[None, :] > own[:, None] - WINDOW)
        scores = tl.where(seen & inside[None, :], _scores(rows, keys, scale, SOFTCAP), float("-inf"))
        values = tl.load(
            value_pages + place[:, None] + dim[None, :], mask=inside[:, None] & dim_mask[None, :], other=0.0
        )
        largest, total, out = _accumulated(scores, values, largest, total, out)
    at = output + (token[:, None] * HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(at, (out / tl.where(total == 0.0, 1.0, total)[:, None]).to(output.dtype.element_ty), mask=both)
