"""Hands the state of a run over from one plan to another, between the same ranks and without a disk.

Both plans hold rectangular regions of the same named tensors. Each rank copies what it holds itself, and gets the rest
from ranks that hold it, in rounds of an all-to-all of bytes on the device. So values keep their bits, and beside the
two states a rank needs two buffers of at most `ROUND_BYTES`. Where ranks of one node can read each other's copies of
the same state in host memory, and collectives would go through sockets, they read those instead.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.checkpoint.load_state import match_shards
from trimaran.checkpoint.shard_index import overlaps, window
from trimaran.parallel.comm.json_exchange import all_gather_json
from trimaran.parallel.tensor_regions import VALUE_BYTES, IndexEntry, TensorIndex, TensorMeta, TensorRegion
from trimaran.parallel.tensor_shards import TORCH_DTYPES, CheckpointSource, TensorShard, copy_values, meta_of

ROUND_BYTES = 256 << 20  # what a rank sends and receives at once, at most, unless one row of a tensor is larger
ALIGNMENT = 16  # of each piece in a buffer, so that it can be viewed with its own dtype

Region = tuple[tuple[int, ...], tuple[int, ...]]  # start and size


@dataclass(frozen=True, slots=True)
class SentRegion:
    """A region of a tensor that rank `source` sends to rank `target`, within the source's region `held`."""

    source: int
    target: int
    key: str
    held: Region
    start: tuple[int, ...]
    size: tuple[int, ...]
    num_bytes: int


class HeldState:
    """The state that the ranks hold now: `shards` of this rank, and of the others what and where. All ranks make one.

    It has the attributes of a `CheckpointSource` that `match_shards` reads.
    """

    def __init__(self, shards: Sequence[TensorShard], *, step: int) -> None:
        self.step, self.progress = step, {}
        self.shards = {
            (shard.key, (tuple(shard.start), tuple(shard.tensor.shape))): shard
            for shard in shards
            if shard.tensor.numel()
        }
        rows = [
            [shard.key, meta_of(shard).dtype, list(shard.shape), list(shard.start), list(shard.tensor.shape)]
            for shard in self.shards.values()
        ]
        self.holders: dict[tuple[str, Region], list[int]] = defaultdict(list)
        metas: dict[str, TensorMeta] = {}
        for rank, held in enumerate(all_gather_json(rows)):
            for key, dtype, shape, start, size in held:
                metas.setdefault(key, TensorMeta(dtype, tuple(shape)))
                self.holders[key, (tuple(start), tuple(size))].append(rank)
        regions: dict[str, list[TensorRegion]] = defaultdict(list)
        for key, (start, size) in self.holders:
            regions[key].append(TensorRegion(start, size, "", 0))
        self.index: TensorIndex = {key: IndexEntry(meta, tuple(regions[key])) for key, meta in metas.items()}

    def read(self, key: str, region: TensorRegion) -> Tensor:
        raise AssertionError("values are handed over by `hand_over`")

    def values(self, key: str, held: Region, start: tuple[int, ...], size: tuple[int, ...]) -> Any:
        """Return a region of what this rank holds, as a view."""
        return self.shards[key, held].tensor[window(start, size, held[0])]


@torch.no_grad()
def hand_over(
    held: HeldState,
    targets: Sequence[TensorShard],
    device: torch.device,
    memory: CheckpointSource | None = None,
    at_half: Callable[[], None] = lambda: None,
) -> int:
    """Fill `targets` from the state that the ranks hold, bit for bit, and return the bytes that this rank received.

    Every rank must call it. `device` is that of the group's collectives. `memory` has a copy of the same state, or of
    most of it, that every rank can read. `at_half` is called when half of the targets are filled. Raises UserError
    before the first value is written if the held state lacks a tensor or has it with another shape or dtype: call
    `match_shards` before where not all ranks would raise.
    """
    rank = dist.get_rank()
    matched = match_shards(targets, held)
    wanted: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[Tensor]] = defaultdict(list)
    requests = []
    for number, (shard, regions) in enumerate(matched):
        if number == len(matched) // 2:
            at_half()
        for region, start, size in regions:
            region_held = (region.start, region.size)
            target: Any = shard.tensor[window(start, size, shard.start)]
            if (shard.key, region_held) in held.shards:
                _copy(held.values(shard.key, region_held, start, size), target, device)
                continue
            if memory is not None and shard.key in memory.index:
                for its, first, extent in overlaps(memory.index[shard.key].regions, start, size):
                    values = memory.read(shard.key, its)[window(first, extent, its.start)]
                    target[window(first, extent, start)].copy_(values)
                continue
            ranks = held.holders[shard.key, region_held]
            for first, extent in _split(start, size, VALUE_BYTES[meta_of(shard).dtype]):
                into: Any = shard.tensor[window(first, extent, shard.start)]
                is_new = (shard.key, first, extent) not in wanted
                wanted[shard.key, first, extent].append(into)
                if is_new:  # tied parameters have the same key
                    requests.append([ranks[rank % len(ranks)], shard.key, *region_held, first, extent])
    pieces = [
        SentRegion(source, target, key, (tuple(a), tuple(b)), tuple(start), tuple(size),
              prod(size) * VALUE_BYTES[held.index[key].meta.dtype])
        for target, rows in enumerate(all_gather_json(requests))
        for source, key, a, b, start, size in rows
    ]  # fmt: skip
    for pieces_of_round in _rounds(pieces):
        _exchange(held, pieces_of_round, wanted, device)
    return sum(each.num_bytes for each in pieces if each.target == rank)


def _exchange(
    held: HeldState, pieces: Sequence[SentRegion], wanted: dict[Any, list[Tensor]], device: torch.device
) -> None:
    """Send and receive the pieces of one round. Both sides have them in the same order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sent = sorted((each for each in pieces if each.source == rank), key=lambda each: each.target)
    received = sorted((each for each in pieces if each.target == rank), key=lambda each: each.source)
    out_sizes, in_sizes = [0] * world_size, [0] * world_size
    for each in sent:
        in_sizes[each.target] += _aligned(each.num_bytes)
    for each in received:
        out_sizes[each.source] += _aligned(each.num_bytes)
    source, target = (torch.empty(sum(sizes), dtype=torch.uint8, device=device) for sizes in (in_sizes, out_sizes))
    for each, view in _views(sent, source, held):
        copy_values(held.values(each.key, each.held, each.start, each.size), view)
    dist.all_to_all_single(target, source, out_sizes, in_sizes)
    for each, view in _views(received, target, held):
        for into in wanted[each.key, each.start, each.size]:
            into.copy_(view)


def _views(pieces: Sequence[SentRegion], buffer: Tensor, held: HeldState) -> Iterator[tuple[SentRegion, Tensor]]:
    """Yield each piece with its part of the buffer, as a tensor of its dtype and shape."""
    offsets = [0, *accumulate(_aligned(each.num_bytes) for each in pieces)]
    for each, offset in zip(pieces, offsets, strict=False):
        dtype = TORCH_DTYPES[held.index[each.key].meta.dtype]
        yield each, buffer[offset : offset + each.num_bytes].view(dtype).view(each.size)


def _rounds(pieces: Sequence[SentRegion]) -> Iterator[list[SentRegion]]:
    """Yield the pieces in rounds in which no rank sends or receives more than `ROUND_BYTES`, or one larger piece."""
    # Targets take turns, so that the ranks send and receive at the same time. All ranks make the same rounds.
    by_target: dict[int, list[SentRegion]] = defaultdict(list)
    for each in reversed(pieces):
        by_target[each.target].append(each)
    while any(by_target.values()):
        sent, received, taken = defaultdict(int), defaultdict(int), list[SentRegion]()
        for target, left in by_target.items():
            while left:
                each = left[-1]
                size = _aligned(each.num_bytes)
                is_first = not received[target] and not sent[each.source]
                if not is_first and max(sent[each.source], received[target]) + size > ROUND_BYTES:
                    break
                sent[each.source] += size
                received[target] += size
                taken.append(left.pop())
        yield taken


def _split(start: tuple[int, ...], size: tuple[int, ...], value_bytes: int) -> Iterator[Region]:
    """Yield the region in parts along dimension 0 of at most half of `ROUND_BYTES`, or of one row."""
    if not size:
        yield start, size
        return
    row_bytes = prod(size[1:]) * value_bytes
    rows = max(1, ROUND_BYTES // 2 // max(1, row_bytes))
    for first in range(0, size[0], rows):
        yield (start[0] + first, *start[1:]), (min(rows, size[0] - first), *size[1:])


def _copy(values: Any, target: Any, device: torch.device) -> None:
    """Copy values from one form in memory to another, which may both differ from that of a checkpoint."""
    if isinstance(values, Tensor):
        target.copy_(values)
        return
    origin = (0,) * values.ndim
    for start, size in _split(origin, tuple(values.shape), values.element_size()):
        part = window(start, size, origin)
        plain = torch.empty(size, dtype=values.dtype, device=device)
        copy_values(values[part], plain)
        target[part].copy_(plain)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
