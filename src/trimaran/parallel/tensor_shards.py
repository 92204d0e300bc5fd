"""The shards of the training state that a rank holds, and the share of it that the rank writes."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from trimaran.parallel.tensor_regions import VALUE_BYTES, TensorIndex, TensorMeta, TensorRegion

if TYPE_CHECKING:
    from trimaran.parallel.disk_store import DiskStore

HALF_BF16_STEP = 0x8000  # half the distance between two bf16 values, in bits of fp32
CHUNK_VALUES = 2**24  # values that are joined or split at once: bounds the temporary memory


def split_fp32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper half of fp32 `values` as bf16, and the lower half as int16. `join_fp32` restores every bit.

    The upper half is the nearest bf16; of two equally near ones, the larger in magnitude. (A cast takes the even one;
    there is no other difference.) Values beyond the largest bf16 by half a step or more have an infinite upper half, as
    with a cast. All bits come back, also those of Inf and NaN; only the upper half of a NaN may not be NaN.
    """
    bits = values.view(torch.int32)
    upper = ((bits + HALF_BF16_STEP) >> 16).to(torch.int16)
    return upper.view(torch.bfloat16), (bits & 0xFFFF).to(torch.int16)


def join_fp32(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the values that `split_fp32` split. A lower half with a sign bit was half a step or more, rounded up."""
    # A little-endian fp32 is the two 16-bit words side by side, so no wider temporary is needed.
    words = torch.stack([lower, upper.view(torch.int16) + (lower >> 15)], dim=-1)
    return words.view(torch.float32).squeeze(-1)


@dataclass(frozen=True, slots=True)
class SplitWeight:
    """A view of an fp32 tensor that is stored as two halves. It has the methods of a tensor that checkpoints call."""

    upper: Tensor
    lower: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.upper.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def ndim(self) -> int:
        return self.upper.ndim

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    @property
    def is_cuda(self) -> bool:
        return self.upper.is_cuda

    def numel(self) -> int:
        return self.upper.numel()

    def element_size(self) -> int:
        return torch.float32.itemsize

    def __getitem__(self, window: Any, /) -> Self:
        return type(self)(self.upper[window], self.lower[window])

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        for upper, lower, chunk in _in_chunks(self.upper, self.lower, values):
            halves = split_fp32(chunk.to(upper.device, torch.float32))
            upper.copy_(halves[0])
            lower.copy_(halves[1])

    @torch.no_grad()
    def copy_to(self, target: Tensor, *, non_blocking: bool) -> None:
        """Copy the values to `target` in small chunks, so that the device never holds a second full tensor."""
        for upper, lower, chunk in _in_chunks(self.upper, self.lower, target):
            chunk.copy_(join_fp32(upper, lower.to(upper.device)), non_blocking=non_blocking)  # may be on disk

    def joined(self) -> Tensor:
        """Return the fp32 values on the CPU."""
        values = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(values, non_blocking=False)
        return values


def _in_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same chunk of each of several tensors of one shape; full rows if any is not contiguous."""
    if all(each.is_contiguous() for each in tensors):
        return zip(*(each.view(-1).split(CHUNK_VALUES) for each in tensors), strict=True)
    rows = max(1, CHUNK_VALUES * len(tensors[0]) // max(1, tensors[0].numel()))
    return zip(*(each.split(rows) for each in tensors), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """The rectangular region of one named tensor that this rank holds. Writing to `tensor` writes the state itself.

    `key` is as in `TensorIndex`. `shape` is that of the full tensor, `start` is where the shard begins; the shard's
    size is the shape of `tensor`. Several ranks may hold the same region. `frozen`: no step of this run changes it.
    `changed_by_forward`: forwards change it as well as updates, such as the statistics of BatchNorm.
    """

    key: str
    tensor: Tensor | SplitWeight
    shape: tuple[int, ...]
    start: tuple[int, ...]
    frozen: bool = False
    changed_by_forward: bool = False


class CheckpointState(Protocol):
    """All state that a run needs for an exact resume: tensors, and plain data that JSON can hold."""

    def shards(self) -> list[TensorShard]:
        """Return the shards that this rank holds, in the same order at every call."""
        ...

    def shards_from(self, index: TensorIndex) -> list[TensorShard]:
        """Return the shards to fill from a checkpoint with this index. `restore` converts them to this rank's state."""
        ...

    def gather(self) -> None:
        """Bring the shards up to date before they are copied. Every rank must call it."""
        ...

    def progress(self) -> dict[str, Any]:
        """Return the rest: loss scale, counters, RNG state. Equal on all ranks."""
        ...

    def restore(self, progress: dict[str, Any]) -> None:
        """Restore what `progress` returned, after the shards of `shards_from` are filled. Every rank must call it."""
        ...


class CheckpointSource(Protocol):
    """A saved state, on disk or in memory, complete and verified."""

    step: int
    progress: dict[str, Any]
    index: TensorIndex

    def read(self, key: str, region: TensorRegion) -> Tensor:
        """Return the values of a region, in its shape, on the CPU. The source owns the memory."""
        ...


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
MIN_ROWS_BYTES = 1 << 20
"""A replicated shard is split so that each rank writes at least this much of it, unless the shard is smaller."""

Gather = Callable[[np.ndarray], np.ndarray]
"""All-gathers int64: given a vector of equal length on every rank, returns the matrix with one row per rank."""


@dataclass(frozen=True, slots=True)
class ShareItem:
    """A region of a tensor and the byte offset at which it begins in the memory of the share."""

    key: str
    meta: TensorMeta
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    frozen: bool

    @property
    def num_bytes(self) -> int:
        return prod(self.size) * VALUE_BYTES[self.meta.dtype]


@dataclass(frozen=True, slots=True)
class RankShare:
    """The items that a rank writes. Frozen items come last, since they go to a file of their own.

    Both halves are sorted by the width of a value, widest first, without gaps: every value is aligned, and each half is
    the data of a safetensors file as it is. The halves begin at multiples of 64 bytes.
    """

    items: tuple[ShareItem, ...]
    num_bytes: int


Rows = tuple[int, int]
"""The first row and the one after the last, along dimension 0 of a shard. A scalar has one row."""


def build_share(shards: Sequence[TensorShard], rows_of_shards: Sequence[Rows]) -> RankShare:
    """Return this rank's share: of each of `shards` the rows that `assign_rows` assigned to it."""
    owned = [(shard, rows) for shard, rows in zip(shards, rows_of_shards, strict=True) if rows[0] < rows[1]]
    owned.sort(key=lambda each: (each[0].frozen, -each[0].tensor.element_size()))
    items: list[ShareItem] = []
    offset, frozen = 0, False
    for shard, (first, end) in owned:
        if shard.frozen and not frozen:
            offset, frozen = _aligned(offset), True
        size = tuple(shard.tensor.shape)
        start = shard.start
        if size:
            start, size = (start[0] + first, *start[1:]), (end - first, *size[1:])
        item = ShareItem(shard.key, meta_of(shard), start, size, offset, shard.frozen)
        items.append(item)
        offset += item.num_bytes
    return RankShare(tuple(items), _aligned(offset))


def copy_to_memory(share: RankShare, shards: Sequence[TensorShard], memory: Tensor) -> None:
    """Copy the values of the share from `shards` to `memory`, `share.num_bytes` bytes on the host.

    Copies from a GPU to pinned memory are asynchronous, on the current stream: synchronize before reading them.
    """
    non_blocking = any(shard.tensor.is_cuda for shard in shards) and memory.is_pinned()
    with torch.no_grad():
        for item, values in zip(share.items, item_values(share, shards), strict=True):
            copy_values(values, item_view(memory, item), non_blocking=non_blocking)


def copy_values(values: Tensor | SplitWeight, target: Tensor, *, non_blocking: bool = False) -> None:
    """Copy the values of a shard to `target`, in the format of the checkpoint."""
    if isinstance(values, Tensor):
        target.copy_(values, non_blocking=non_blocking)
    else:
        values.copy_to(target, non_blocking=non_blocking)


def item_values(share: RankShare, shards: Sequence[TensorShard]) -> list[Tensor | SplitWeight]:
    """Return the values of each item of the share, as views of `shards`."""
    held = defaultdict(list)
    for shard in shards:
        held[shard.key].append(shard)
    with torch.no_grad():
        return [_slice_item(held[item.key], item) for item in share.items]


def item_view(memory: Tensor, item: ShareItem) -> Tensor:
    return memory[item.offset : item.offset + item.num_bytes].view(TORCH_DTYPES[item.meta.dtype]).view(item.size)


def meta_of(shard: TensorShard) -> TensorMeta:
    return TensorMeta(DTYPE_NAMES[shard.tensor.dtype], shard.shape)


def _slice_item(candidates: list[TensorShard], item: ShareItem) -> Tensor | SplitWeight:
    for shard in candidates:
        first = [mine - its for mine, its in zip(item.start, shard.start, strict=True)]
        spans = zip(first, item.size, shard.tensor.shape, strict=True)
        if all(begin >= 0 and begin + extent <= limit for begin, extent, limit in spans):
            return shard.tensor[tuple(slice(begin, begin + n) for begin, n in zip(first, item.size, strict=True))]
    raise AssertionError(f"no shard holds {item}")


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def assign_rows(
    shards: Sequence[TensorShard], *, rank: int, world_size: int, gather: Gather, min_rows_bytes: int = MIN_ROWS_BYTES
) -> list[Rows]:
    """Return, for each of this rank's shards, the rows that this rank writes. The ranks together write all rows once.

    Every rank must call it. Ranks with the same shards take turns, the largest shards first, and large shards are
    split between as many ranks as get `min_rows_bytes` each. A rank needs one number for each shard of the others and
    looks its own up among them: the work is linear in the number of ranks, and no assignment is sent back.
    """
    ids = np.array([_shard_id(shard) for shard in shards], dtype=np.int64)
    # The ids of all ranks, one row per rank, padded with zeros.
    counts = gather(np.array([len(ids)], dtype=np.int64))
    row = np.zeros(int(counts.max()), dtype=np.int64)
    row[: len(ids)] = ids
    all_ids = gather(row)
    assert all_ids.shape == (world_size, len(row)), all_ids.shape
    holders = _holders(ids, rank, all_ids)
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


MIN_DISK_BYTES = 1 << 16  # a smaller tensor stays in memory
STORES: "WeakSet[DiskStore]" = WeakSet()  # of this process


def store_of(tensor: Tensor) -> "DiskStore | None":
    """Return the store that holds a tensor; None if it is in memory."""
    if not tensor.is_cpu:
        return None
    return next((store for store in STORES if store.holds(tensor)), None)


def release_pages() -> None:
    """Write back what was written to tensors on disk as such, and free their pages: something was loaded into them."""
    for store in list(STORES):
        store.release()


def goes_to_disk(num_bytes: int) -> bool:
    return num_bytes >= MIN_DISK_BYTES
