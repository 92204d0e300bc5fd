"""What one rank alone writes of the state: rectangles, one after the other in a flat memory."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from trimaran.checkpoint.tensor_regions import VALUE_BYTES, Whole
from trimaran.checkpoint.tensor_shards import Composed, TensorShard

ALIGNMENT = 64
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Item:
    """A rectangle of a whole and the byte at which it begins in the memory of its share."""

    key: str
    whole: Whole
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    frozen: bool

    @property
    def num_bytes(self) -> int:
        return prod(self.size) * VALUE_BYTES[self.whole.dtype]


@dataclass(frozen=True, slots=True)
class RankShare:
    """What a rank writes. What no step changes comes last, so that it makes a file of its own.

    Within both halves wide values come before narrow ones without a gap between: each lies at a multiple of its width,
    and a half is a safetensors file's data as it stands. The halves begin at multiples of 64 bytes.
    """

    items: tuple[Item, ...]
    num_bytes: int


Rows = tuple[int, int]
"""First row and the one after the last, of a piece's dimension 0; a scalar counts as one row."""


def lay_out(pieces: Sequence[TensorShard], rectangles: Sequence[Rows]) -> RankShare:
    """Return the share that `ownership.own` gave this rank as `rectangles`, one for each of `pieces`."""
    owned = [(piece, rows) for piece, rows in zip(pieces, rectangles, strict=True) if rows[0] < rows[1]]
    owned.sort(key=lambda each: (each[0].frozen, -each[0].tensor.element_size()))
    items: list[Item] = []
    offset, frozen = 0, False
    for piece, (first, end) in owned:
        if piece.frozen and not frozen:
            offset, frozen = _aligned(offset), True
        size = tuple(piece.tensor.shape)
        start = piece.start
        if size:
            start, size = (start[0] + first, *start[1:]), (end - first, *size[1:])
        item = Item(piece.key, whole_of(piece), start, size, offset, piece.frozen)
        items.append(item)
        offset += item.num_bytes
    return RankShare(tuple(items), _aligned(offset))


def copy_in(share: RankShare, pieces: Sequence[TensorShard], memory: Tensor) -> None:
    """Copy the values of the share out of `pieces` into `memory`, `share.num_bytes` bytes on the host.

    From a device into pinned memory the copies are only started, on the current stream: wait before reading them.
    """
    started = any(piece.tensor.is_cuda for piece in pieces) and memory.is_pinned()
    with torch.no_grad():
        for item, values in zip(share.items, values_of(share, pieces), strict=True):
            copy_out(values, view_of(memory, item), non_blocking=started)


def copy_out(values: Tensor | Composed, target: Tensor, *, non_blocking: bool = False) -> None:
    """Copy what a piece holds into `target`, as it is kept."""
    if isinstance(values, Tensor):
        target.copy_(values, non_blocking=non_blocking)
    else:
        values.copy_to(target, non_blocking=non_blocking)


def values_of(share: RankShare, pieces: Sequence[TensorShard]) -> list[Tensor | Composed]:
    """Return the values of each item of the share: views of what `pieces` hold."""
    held = defaultdict(list)
    for piece in pieces:
        held[piece.key].append(piece)
    with torch.no_grad():
        return [_cut(held[item.key], item) for item in share.items]


def view_of(memory: Tensor, item: Item) -> Tensor:
    """Return the memory of one item as a tensor in its shape."""
    return memory[item.offset : item.offset + item.num_bytes].view(TORCH_DTYPES[item.whole.dtype]).view(item.size)


def whole_of(piece: TensorShard) -> Whole:
    """Return the tensor that `piece` is a rectangle of."""
    return Whole(DTYPE_NAMES[piece.tensor.dtype], piece.shape)


def _cut(candidates: list[TensorShard], item: Item) -> Tensor | Composed:
    for piece in candidates:
        first = [mine - its for mine, its in zip(item.start, piece.start, strict=True)]
        spans = zip(first, item.size, piece.tensor.shape, strict=True)
        if all(begin >= 0 and begin + extent <= room for begin, extent, room in spans):
            return piece.tensor[tuple(slice(begin, begin + n) for begin, n in zip(first, item.size, strict=True))]
    raise AssertionError(f"no piece holds {item}")


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
