"""Copies of the state in memory that the supervisor owns, so that they outlive the rank that made them.

A `RankMemory` is the memory of one local rank of a node. It is a memfd: one page with the layout, then slots of equal
size. A slot holds one rank's share of one step. A rank invalidates a slot before it writes to it and commits it after;
a rank that is killed in between leaves an invalid slot. With two slots in turn, one step that all ranks have survives
every kill: a rank overwrites a slot only after a step that needed all ranks, so all have committed the step before.
"""

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimaran.checkpoint.rank_layout import RankLayout, all_true, can_pair
from trimaran.core import CheckpointSection, UserError, show_bytes
from trimaran.machine.host_limits import free_bytes
from trimaran.parallel import IndexEntry, TensorIndex, TensorMeta, TensorRegion, all_gather_int64
from trimaran.parallel.tensor_shards import RankShare, ShareItem, item_view

PAGE_BYTES = 4096
LAYOUT = struct.Struct("=8sQQQI")
"""Of a rank memory: magic, number of slots, bytes for a header, bytes for data, CRC-32 of these."""
SLOT_START = struct.Struct("=8sQQQI")
"""Of a slot: magic, bytes of the header, bytes of the data, checksum of the data, CRC-32 of the header and these."""
MAGIC = b"trimaran"
MAX_PROGRESS_BYTES = 64 << 10  # what a header may take besides the list of items
BLOCK_WORDS = 1 << 17
BLOCKS_PER_PART = 32  # of 1 MiB: what a thread adds up at once for a checksum
MAX_CHECKSUM_THREADS = 4
ALLOCATE_BYTES = 1 << 30  # bytes allocated per system call
SPARE_FRACTION = 32  # a new slot has one more byte for each 32 of its share
SPARE_ITEMS = 2  # times the list of items, which has an entry for each tensor or part of one
STAT_BLOCK_BYTES = 512
MAX_FREE_MEMORY_FRACTION = 0.5
"""Of the memory that is free before the first step, copies may take this fraction. Training needs the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyMetadata:
    """What a slot holds: the share of `rank` of `world_size` after `step` steps.

    `incarnation` is the attempt of the run and how often it rewound: it tells states of the same step apart.
    """

    step: int
    incarnation: tuple[int, int]
    rank: int
    world_size: int
    progress: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotContents:
    """A slot whose header is valid: metadata, share, and the memory, which is not verified yet."""

    metadata: CopyMetadata
    share: RankShare
    memory: Tensor
    checksum: int

    def verify(self) -> bool:
        """Return whether the values match the checksum they were committed with."""
        return checksum(self.memory) == self.checksum


class MemorySlot:
    """A slice of a rank memory that holds one share."""

    def __init__(self, memory: Tensor, header_bytes: int) -> None:
        self.memory, self._header_bytes, self._header = memory, header_bytes, memory[:header_bytes].numpy()
        self.data = memory[header_bytes:]  # all memory for values; a share takes the first bytes of it

    def invalidate(self) -> None:
        """Make the slot invalid: what it held is lost."""
        self._write(0, bytes(SLOT_START.size))

    def commit(self, metadata: CopyMetadata, items: bytes, num_bytes: int) -> None:
        """Make the slot valid: `num_bytes` of the data are the share whose items `encode_items` encoded."""
        header = _encode_header(metadata, items)
        if SLOT_START.size + len(header) > self._header_bytes:
            raise ValueError(f"a header of {len(header)} bytes does not fit into {self._header_bytes}")
        self._write(SLOT_START.size, header)
        fields = (MAGIC, len(header), num_bytes, checksum(self.data[:num_bytes]))
        crc = zlib.crc32(header, zlib.crc32(repr(fields).encode()))
        self._write(0, SLOT_START.pack(*fields, crc))

    def read(self) -> SlotContents | None:
        """Return the contents; None if the slot is invalid or its header is damaged."""
        magic, header_bytes, num_bytes, total, crc = SLOT_START.unpack(self._read(0, SLOT_START.size))
        if magic != MAGIC or SLOT_START.size + header_bytes > self._header_bytes or num_bytes > len(self.data):
            return None
        header = self._read(SLOT_START.size, header_bytes)
        if crc != zlib.crc32(header, zlib.crc32(repr((magic, header_bytes, num_bytes, total)).encode())):
            return None
        metadata, items = _decode_header(header)
        share, memory = RankShare(items, num_bytes), self.data[:num_bytes]
        return SlotContents(metadata=metadata, share=share, memory=memory, checksum=total)

    def _write(self, offset: int, data: bytes) -> None:
        self._header[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)

    def _read(self, offset: int, num_bytes: int) -> bytes:
        return self._header[offset : offset + num_bytes].tobytes()


class RankMemory:
    """Memory of one local rank that outlives its process. The owner keeps `fd` open; this object never closes it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.slots: tuple[MemorySlot, ...] = ()
        self._layout = (0, 0, 0)
        self._open()

    @property
    def num_bytes(self) -> int:
        """The size. Less may be allocated until `allocate` has returned."""
        return os.fstat(self.fd).st_size

    @property
    def allocated_bytes(self) -> int:
        """How much of the node's memory it takes now."""
        return os.fstat(self.fd).st_blocks * STAT_BLOCK_BYTES

    def create_slots(self, num_slots: int, *, num_bytes: int, items_bytes: int, allocate: bool = True) -> bool:
        """Split the memory into slots for shares of up to `num_bytes`; return whether its contents are still there.

        They are if the slots were large enough already. New ones are a little larger than asked for: under another
        plan a rank's share is seldom exactly as large. The memory is allocated now, so that a lack of it is an OSError;
        without `allocate` the caller must call `allocate`.
        """
        if self.has_layout(num_slots, num_bytes=num_bytes, items_bytes=items_bytes):
            return True
        layout = _layout(num_slots, num_bytes + num_bytes // SPARE_FRACTION, SPARE_ITEMS * items_bytes)
        self.slots, self._layout = (), (0, 0, 0)
        os.ftruncate(self.fd, 0)
        size = PAGE_BYTES + num_slots * (layout[1] + layout[2])
        os.ftruncate(self.fd, size)
        if allocate:
            self.allocate()
        fields = (MAGIC, *layout)
        os.pwrite(self.fd, LAYOUT.pack(*fields, zlib.crc32(repr(fields).encode())), 0)
        self._open()
        return False

    def has_layout(self, num_slots: int, *, num_bytes: int, items_bytes: int) -> bool:
        """Return whether `create_slots` would leave the contents as they are."""
        count, header, data = _layout(num_slots, num_bytes, items_bytes)
        return self._layout[0] == count and self._layout[1] >= header and self._layout[2] >= data

    def allocate(self, should_continue: Callable[[], bool] = lambda: True) -> None:
        """Allocate the memory, about 6 GB a second, while `should_continue`. A lack of memory is an OSError."""
        size = self.num_bytes
        for start in range(0, size, ALLOCATE_BYTES):
            if should_continue():
                os.posix_fallocate(self.fd, start, min(ALLOCATE_BYTES, size - start))

    def valid_slots(self) -> list[tuple[MemorySlot, SlotContents]]:
        """Return the slots with a valid header, and their contents."""
        found = [(slot, slot.read()) for slot in self.slots]
        return [(slot, contents) for slot, contents in found if contents is not None]

    def _open(self) -> None:
        if self.num_bytes < PAGE_BYTES:
            return
        magic, *layout, crc = LAYOUT.unpack(os.pread(self.fd, LAYOUT.size, 0))
        num_slots, header, data = layout
        is_valid = magic == MAGIC and crc == zlib.crc32(repr((magic, *layout)).encode())
        if not is_valid or self.num_bytes != PAGE_BYTES + num_slots * (header + data):
            return
        memory = torch.frombuffer(mmap.mmap(self.fd, self.num_bytes), dtype=torch.uint8)
        self._layout = (num_slots, header, data)
        starts = [PAGE_BYTES + index * (header + data) for index in range(num_slots)]
        self.slots = tuple(MemorySlot(memory[start : start + header + data], header) for start in starts)


class MemorySource:
    """A step from the verified slots of all ranks that saved it; see `tensor_shards.CheckpointSource`."""

    def __init__(self, shares: Mapping[int, SlotContents]) -> None:
        """`shares` are by rank, all of one step and incarnation."""
        metadata = next(iter(shares.values())).metadata
        self.step, self.progress = metadata.step, metadata.progress
        self._memory = {str(rank): contents.memory for rank, contents in shares.items()}
        self.index: TensorIndex = index_of({rank: contents.share for rank, contents in shares.items()})

    def read(self, key: str, region: TensorRegion) -> Tensor:
        item = ShareItem(key, self.index[key].meta, region.start, region.size, region.offset, False)
        return item_view(self._memory[region.file], item)


def index_of(shares: Mapping[int, RankShare]) -> TensorIndex:
    """Return the index of these shares; the `file` of a region is its rank."""
    metas: dict[str, TensorMeta] = {}
    regions: dict[str, list[TensorRegion]] = {}
    for rank, share in shares.items():
        for item in share.items:
            metas[item.key] = item.meta
            regions.setdefault(item.key, []).append(TensorRegion(item.start, item.size, str(rank), item.offset))
    return {key: IndexEntry(meta, tuple(regions[key])) for key, meta in metas.items()}


def checksum(data: Tensor) -> int:
    """Return a checksum of `data`, whose length is a multiple of 8. It is three times as fast as a CRC.

    It is the CRC-32 of the int64 sums of its blocks. A flipped bit, a zeroed page or a page of another step changes
    it. Swapping words within a block does not, but no memory fault does that. Few threads compute it, without the GIL:
    it is also called beside training.
    """
    words = data.numpy().view(np.int64)
    in_blocks = len(words) // BLOCK_WORDS * BLOCK_WORDS
    blocks = words[:in_blocks].reshape(-1, BLOCK_WORDS)
    parts = [blocks[first : first + BLOCKS_PER_PART] for first in range(0, len(blocks), BLOCKS_PER_PART)]
    num_threads = min(MAX_CHECKSUM_THREADS, torch.get_num_threads(), len(parts))
    if num_threads > 1:
        with ThreadPoolExecutor(num_threads, "trimaran-checksum") as threads:
            sums = [*threads.map(lambda each: each.sum(axis=1), parts)]
    else:
        sums = [each.sum(axis=1) for each in parts]
    return zlib.crc32(np.concatenate([*sums, words[in_blocks:].sum(keepdims=True)]).tobytes())


def encode_items(items: Iterable[ShareItem]) -> bytes:
    """Return the items of a share as JSON."""
    rows = [(each.key, each.meta.dtype, each.meta.shape, each.start, each.size, each.offset, each.frozen)
            for each in items]  # fmt: skip
    return json.dumps(rows, separators=(",", ":")).encode()


def encode_contents(contents: SlotContents) -> str:
    """Return the contents of a slot without the values, as text for another rank."""
    header = _encode_header(contents.metadata, encode_items(contents.share.items))
    return f"{contents.checksum} {contents.share.num_bytes}\n{header.decode()}"


def decode_contents(text: str) -> SlotContents:
    """Return what `encode_contents` encoded; the memory is empty."""
    numbers, header = text.split("\n", 1)
    total, num_bytes = map(int, numbers.split())
    metadata, items = _decode_header(header.encode())
    memory = torch.empty(0, dtype=torch.uint8)
    return SlotContents(metadata=metadata, share=RankShare(items, num_bytes), memory=memory, checksum=total)


def _encode_header(metadata: CopyMetadata, items: bytes) -> bytes:
    fields = {each.name: getattr(metadata, each.name) for each in dataclass_fields(metadata)}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n" + items


def _decode_header(header: bytes) -> tuple[CopyMetadata, tuple[ShareItem, ...]]:
    fields, rows = map(json.loads, header.split(b"\n", 1))
    attempt, num_rewinds = fields.pop("incarnation")
    items = tuple(
        ShareItem(key, TensorMeta(dtype, tuple(shape)), tuple(start), tuple(size), offset, frozen)
        for key, dtype, shape, start, size, offset, frozen in rows
    )
    return CopyMetadata(incarnation=(attempt, num_rewinds), **fields), items


def _layout(num_slots: int, num_bytes: int, items_bytes: int) -> tuple[int, int, int]:
    """Return the number of slots, the bytes of a header and the bytes of the data of a slot."""
    sizes = SLOT_START.size + items_bytes + MAX_PROGRESS_BYTES, num_bytes
    header, data = (-(-size // PAGE_BYTES) * PAGE_BYTES for size in sizes)
    return num_slots, header, data


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The slots of each rank: `own_slots` for its own copies, `peer_slots` for those of a rank on another node.

    With `keeps_copies` the slots hold copies to restore from. Without it a single slot only holds a checkpoint until
    it is on disk. With no slot the checkpoint waits in a file on its own disk, and training waits until it is written.
    """

    own_slots: int
    peer_slots: int = 0
    keeps_copies: bool = True

    @property
    def num_slots(self) -> int:
        return self.own_slots + self.peer_slots


NO_SLOTS = MemoryBudget(own_slots=0, keeps_copies=False)


def budget_options(section: CheckpointSection, *, has_rank_memory: bool, pairs: bool) -> list[MemoryBudget]:
    """Return the possible budgets, the best first; the last has no slots.

    `has_rank_memory`: copies are useful, since they can be restored from. `pairs`: each rank has a partner on another
    node.
    """
    # Without checkpoints nothing waits in a slot for the disk.
    last = [NO_SLOTS] if section.is_off else [MemoryBudget(own_slots=1, keeps_copies=False), NO_SLOTS]
    if not has_rank_memory or section.memory == 0:
        return last
    alone = [MemoryBudget(own_slots=count) for count in ((3, 2) if section.asynchronous else (2,))]
    # Two more slots cannot be overwritten: the one being sent to another node, and the one that was sent last.
    paired = [MemoryBudget(own_slots=each.own_slots + 2, peer_slots=2) for each in alone if pairs]
    return [*paired, *alone, *last]


def first_fitting_budget(
    options: Sequence[MemoryBudget], slot_bytes: Sequence[int], nodes: Sequence[int], free: Sequence[int]
) -> MemoryBudget:
    """Return the first of `options` for which every node has the memory; the last needs none.

    For each rank: the bytes of one of its slots, its node, and the free bytes of that node.
    """
    needs = [_on_node(slot_bytes, nodes, node) for node in nodes]
    for option in options[:-1]:
        pairs = zip(needs, free, strict=True)
        if all(option.num_slots * size <= MAX_FREE_MEMORY_FRACTION * has for size, has in pairs):
            return option
    return options[-1]


def _on_node(sizes: Sequence[int], nodes: Sequence[int], node: int) -> int:
    """Return the sum of the sizes, by rank, of the ranks on a node."""
    return sum(size for size, each in zip(sizes, nodes, strict=True) if each == node)


def choose_budget(
    section: CheckpointSection,
    rank_layout: RankLayout,
    *,
    slot_bytes: int,
    rank_memory_bytes: int,
    has_rank_memory: bool,
) -> MemoryBudget:
    """Return the memory budget for copies. Every rank must call it.

    `rank_memory_bytes` are allocated already and count as free. Raises UserError if the recipe demands copies in
    memory and they do not fit.
    """
    mine = np.array([slot_bytes, free_bytes(), rank_memory_bytes], dtype=np.int64)
    sizes, free, allocated = all_gather_int64(mine).T.tolist()
    nodes = rank_layout.nodes
    available = [has + _on_node(allocated, nodes, here) for has, here in zip(free, nodes, strict=True)]
    options = budget_options(section, has_rank_memory=has_rank_memory, pairs=can_pair(rank_layout) and has_rank_memory)
    budget = first_fitting_budget(options, sizes, nodes, available)
    if isinstance(section.memory, int) and section.memory > 0 and has_rank_memory and not budget.keeps_copies:
        needs = 2 * _on_node(sizes, nodes, rank_layout.node)
        allowed = int(MAX_FREE_MEMORY_FRACTION * available[rank_layout.rank])
        raise UserError(
            "K040.two-copies-state", where="checkpoint.memory", needs=show_bytes(needs), allowed=show_bytes(allowed)
        )
    return budget


class SlotPool:
    """Slots used in turn. Every rank makes one. If a node turns out to lack the memory, `budget` has no slots.

    Without `allocate`, another thread calls `RankMemory.allocate` before a slot is used, and `release` if that fails.
    """

    def __init__(
        self, rank_memory: RankMemory, budget: MemoryBudget, *, num_bytes: int, items_bytes: int, allocate: bool = True
    ) -> None:
        self.rank_memory = rank_memory
        had_memory = True
        try:
            if count := budget.num_slots:
                rank_memory.create_slots(count, num_bytes=num_bytes, items_bytes=items_bytes, allocate=allocate)
        except OSError:
            had_memory = False
        self.budget = budget if all_true(had_memory) else NO_SLOTS
        if not self.budget.num_slots:
            os.ftruncate(rank_memory.fd, 0)
        self.own_slots = rank_memory.slots[: budget.own_slots] if self.budget.num_slots else ()
        self.peer_slots = rank_memory.slots[budget.own_slots :] if self.budget.num_slots else ()
        self._steps: dict[MemorySlot, int] = {}
        self._mine: set[MemorySlot] = set()

    def clear_except(self, incarnation: tuple[int, int] | None, step: int, share: RankShare) -> None:
        """Invalidate all slots except those that hold the state of `step` of this incarnation.

        Of these, only slots with this rank's `share` count as its own copy: the ranks may have been others, with
        another sharding.
        """
        self._steps, self._mine = {}, set()
        for slot in (*self.own_slots, *self.peer_slots):
            contents = slot.read()
            if contents is None or (contents.metadata.incarnation, contents.metadata.step) != (incarnation, step):
                slot.invalidate()
            elif slot in self.own_slots:
                self._steps[slot] = step
                self._mine |= {slot} if contents.share == share else set()

    def release(self) -> None:
        """Continue without slots. All ranks must do this together: checkpoints then wait in a file on the disk."""
        self.budget, self.own_slots, self.peer_slots = NO_SLOTS, (), ()
        self._steps, self._mine = {}, set()
        os.ftruncate(self.rank_memory.fd, 0)

    def next_slot(self, busy: Collection[MemorySlot]) -> MemorySlot:
        """Return the slot to copy to: the one with the oldest state that is not in use."""
        return min((slot for slot in self.own_slots if slot not in busy), key=lambda slot: self._steps.get(slot, -1))

    def mark_filled(self, slot: MemorySlot, step: int) -> None:
        """Record that `slot` holds this rank's share of `step`."""
        self._steps[slot] = step
        self._mine.add(slot)

    def slot_of(self, step: int) -> MemorySlot | None:
        """Return the slot that holds this rank's share of the state of `step`."""
        return next((slot for slot, each in self._steps.items() if each == step and slot in self._mine), None)
