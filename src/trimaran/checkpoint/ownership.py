"""Decides which rank writes which rows of a replicated shard, so that each byte is written once."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np

from trimaran.checkpoint.rank_share import Rows
from trimaran.checkpoint.tensor_shards import TensorShard

MIN_ROWS_BYTES = 1 << 20
"""A replicated shard is split so that each rank writes at least this much of it, unless the shard is smaller."""

Gather = Callable[[np.ndarray], np.ndarray]
"""All-gathers int64: given a vector of equal length on every rank, returns the matrix with one row per rank."""


def assign_rows(
    shards: Sequence[TensorShard], *, rank: int, world_size: int, gather: Gather, min_rows_bytes: int = MIN_ROWS_BYTES
) -> list[Rows]:
    """Return, for each of this rank's shards, the rows that this rank writes. The ranks together write all rows once.

    Every rank must call it. Ranks with the same shards take turns, the largest shards first, and large shards are
    split between as many ranks as get `min_rows_bytes` each. A rank needs one number for each shard of the others and
    looks its own up among them: the work is linear in the number of ranks, and no assignment is sent back.
    """
    ids = np.array([_shard_id(shard) for shard in shards], dtype=np.int64)
    holders = _holders(ids, rank, _gather_ids(ids, gather, world_size))
    turns: dict[tuple[int, ...], int] = defaultdict(int)
    rows: list[Rows] = [(0, 0)] * len(shards)
    seen: set[int] = set()
    order = sorted(range(len(shards)), key=lambda index: (-shards[index].tensor.nbytes, ids[index]))
    for index in order:
        shard_id, tensor = int(ids[index]), shards[index].tensor
        if shard_id in seen or tensor.numel() == 0:
            continue
        seen.add(shard_id)
        ranks = holders[shard_id]
        num_rows = tensor.shape[0] if tensor.ndim else 1
        num_writers = min(len(ranks), num_rows, max(1, tensor.nbytes // min_rows_bytes))
        turn = (ranks.index(rank) - turns[ranks]) % len(ranks)
        turns[ranks] += num_writers
        if turn < num_writers:
            rows[index] = (turn * num_rows // num_writers, (turn + 1) * num_rows // num_writers)
    return rows


def _shard_id(shard: TensorShard) -> int:
    """Return a hash of the shard's key, region and dtype. It is never 0, which is padding."""
    text = f"{shard.key}\n{shard.start}\n{tuple(shard.tensor.shape)}\n{shard.tensor.dtype}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), signed=True) or 1


def _gather_ids(ids: np.ndarray, gather: Gather, world_size: int) -> np.ndarray:
    """Return the ids of all ranks, one row per rank, padded with zeros."""
    counts = gather(np.array([len(ids)], dtype=np.int64))
    row = np.zeros(int(counts.max()), dtype=np.int64)
    row[: len(ids)] = ids
    all_ids = gather(row)
    assert all_ids.shape == (world_size, len(row)), all_ids.shape
    return all_ids


def _holders(ids: np.ndarray, rank: int, all_ids: np.ndarray) -> dict[int, tuple[int, ...]]:
    """Return, for each of `ids`, the ranks that hold it, in ascending order."""
    mine = np.unique(ids)
    if not len(mine):
        return {}
    found: dict[int, list[int]] = {int(each): [] for each in mine}
    for other, row in enumerate(all_ids):
        # Most ranks hold none of this rank's shards; each of them costs one vector operation.
        nearest = mine[np.minimum(np.searchsorted(mine, row), len(mine) - 1)]
        for each in mine if other == rank else np.unique(row[nearest == row]):
            found[int(each)].append(other)
    return {each: tuple(ranks) for each, ranks in found.items()}
