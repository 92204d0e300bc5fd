"""Who writes what: of a rectangle that several ranks hold, each takes some rows."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np

from trimaran.checkpoint.rank_share import Rows
from trimaran.checkpoint.tensor_shards import TensorShard

SPLIT_BYTES = 1 << 20
"""No holder takes less than this of a rectangle, unless it is all there is."""

Gather = Callable[[np.ndarray], np.ndarray]
"""All-gathers int64: given a vector of equal length on every rank, returns the matrix of them, a row for each rank."""


def own(pieces: Sequence[TensorShard], *, rank: int, world_size: int, gather: Gather) -> list[Rows]:
    """Return, for each of this rank's pieces, the rows that this rank writes; together the ranks write all just once.

    Every rank calls it. Ranks that hold the same rectangles take turns, the largest rectangles first, and big ones are
    split between as many of them as get a mebibyte each. What a rank must know of the others is one number for each of
    their pieces, and it looks up its own in theirs: linear in the ranks, and no plan is sent back.
    """
    names = np.array([_name(piece) for piece in pieces], dtype=np.int64)
    holders = _holders(names, rank, _padded(names, gather, world_size))
    turns: dict[tuple[int, ...], int] = defaultdict(int)
    rows: list[Rows] = [(0, 0)] * len(pieces)
    seen: set[int] = set()
    order = sorted(range(len(pieces)), key=lambda index: (-pieces[index].tensor.nbytes, names[index]))
    for index in order:
        name, tensor = int(names[index]), pieces[index].tensor
        if name in seen or tensor.numel() == 0:
            continue
        seen.add(name)
        ranks = holders[name]
        num_rows = tensor.shape[0] if tensor.ndim else 1
        num_parts = min(len(ranks), num_rows, max(1, tensor.nbytes // SPLIT_BYTES))
        turn = (ranks.index(rank) - turns[ranks]) % len(ranks)
        turns[ranks] += num_parts
        if turn < num_parts:
            rows[index] = (turn * num_rows // num_parts, (turn + 1) * num_rows // num_parts)
    return rows


def _name(piece: TensorShard) -> int:
    """Return a number that tells this rectangle from all others. Zero is nobody's name."""
    text = f"{piece.key}\n{piece.start}\n{tuple(piece.tensor.shape)}\n{piece.tensor.dtype}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), signed=True) or 1


def _padded(names: np.ndarray, gather: Gather, world_size: int) -> np.ndarray:
    """Return everybody's names, a row for each rank, filled up with zeros."""
    counts = gather(np.array([len(names)], dtype=np.int64))
    line = np.zeros(int(counts.max()), dtype=np.int64)
    line[: len(names)] = names
    everybody = gather(line)
    assert everybody.shape == (world_size, len(line)), everybody.shape
    return everybody


def _holders(names: np.ndarray, rank: int, everybody: np.ndarray) -> dict[int, tuple[int, ...]]:
    """Return, for each of `names`, the ranks that hold it, in ascending order."""
    mine = np.unique(names)
    if not len(mine):
        return {}
    found: dict[int, list[int]] = {int(name): [] for name in mine}
    for other, line in enumerate(everybody):
        # A rank that holds none of mine, as most do, costs one vector operation.
        nearby = mine[np.minimum(np.searchsorted(mine, line), len(mine) - 1)]
        for name in mine if other == rank else np.unique(line[nearby == line]):
            found[int(name)].append(other)
    return {name: tuple(ranks) for name, ranks in found.items()}
