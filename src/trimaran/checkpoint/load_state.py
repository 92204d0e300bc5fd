"""Fills what a rank holds from a state that was kept, however that one was cut."""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from trimaran.checkpoint.ownership import Gather
from trimaran.checkpoint.rank_share import whole_of
from trimaran.checkpoint.tensor_regions import TensorRegion, overlap
from trimaran.checkpoint.tensor_shards import Source, TensorShard
from trimaran.core import UserError, nearest

MANY = 5
SAME_MODEL = "resume with the model and optimizer that it was saved with"
ANOTHER = "resume from another checkpoint: `trimaran checkpoints verify RUN` says which are whole"


def fill(pieces: Sequence[TensorShard], source: Source) -> None:
    """Copy the values of every piece out of `source`, bit by bit. Nothing is written before all are known to fit.

    Raises UserError for a tensor that the source lacks, or has in another shape or type, or has only in part.
    """
    checked = [(piece, _fitting(piece, source)) for piece in pieces]
    with torch.no_grad():
        for piece, parts in checked:
            for part, start, size in parts:
                values = source.read(piece.key, part)[_window(start, size, part.start)]
                piece.tensor[_window(start, size, piece.start)].copy_(values)


def refuse_leftovers(
    pieces: Sequence[TensorShard], source: Source, *, gather: Gather, allowed: Sequence[str] = ()
) -> None:
    """Raise UserError when `source` has keys that no rank has a place for. Every rank calls it.

    `allowed` are beginnings of keys that may be left over, such as `optimizer/` where only weights are wanted.
    """
    keys = sorted(source.index)
    wanted = {piece.key for piece in pieces}
    bits = np.packbits(np.array([key in wanted for key in keys], dtype=bool))
    words = np.zeros(-(-len(bits) // 8), dtype=np.int64)
    words.view(np.uint8)[: len(bits)] = bits
    anywhere = np.bitwise_or.reduce(gather(words), axis=0)
    taken = np.unpackbits(anywhere.view(np.uint8), count=len(keys))
    left = [key for key, used in zip(keys, taken, strict=True) if not used and not key.startswith(tuple(allowed))]
    if left:
        some = ", ".join(left[:MANY]) + (", ..." if len(left) > MANY else "")
        what = f"has {len(left)} tensors that this run has no place for: {some}"
        raise _misfit("K005", what, left[0], source, SAME_MODEL)


def _fitting(piece: TensorShard, source: Source) -> list[tuple[TensorRegion, tuple[int, ...], tuple[int, ...]]]:
    """Return the parts that `piece` overlaps, each with start and size of the overlap, which together cover it."""
    if not all(piece.shape):
        return []
    wants, entry = whole_of(piece), source.index.get(piece.key)
    if entry is None:
        what = f"does not have {piece.key}{nearest(piece.key, source.index)}"
        raise _misfit("K001", what, piece.key, source, SAME_MODEL)
    has = entry.whole
    if wants.shape != has.shape:
        what = f"has {piece.key} as {_shape(has.shape)}, this run wants {_shape(wants.shape)}"
        raise _misfit("K003", what, piece.key, source, SAME_MODEL)
    if wants.dtype != has.dtype:
        what = f"has {piece.key} as {has.dtype}, this run wants {wants.dtype}"
        raise _misfit("K002", what, piece.key, source, "resume with the precision and optimizer that it was saved with")
    size = tuple(piece.tensor.shape)
    found = [(part, *both) for part in entry.parts if (both := overlap(piece.start, size, part.start, part.size))]
    num_values = sum(prod(extent) for _, _, extent in found)
    if num_values != piece.tensor.numel():
        what = f"has {num_values:,} of the {piece.tensor.numel():,} values of {piece.key} that are wanted"
        raise _misfit("K004", what, piece.key, source, ANOTHER)
    return found


def _window(start: tuple[int, ...], size: tuple[int, ...], origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the rectangle as slices of a tensor that begins at `origin`."""
    return tuple(slice(low - base, low - base + n) for low, n, base in zip(start, size, origin, strict=True))


def _misfit(code: str, what: str, key: str, source: Source, fix: str) -> UserError:
    return UserError(code, f"the checkpoint of step {source.step} {what}", where=key, fix=fix)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if shape else "one value"
