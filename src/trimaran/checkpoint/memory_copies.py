"""Copies of the state in memory that a supervisor owns: they outlive the rank that made them.

A rank memory is the memory of one rank's place on a node, a memfd: a page that says how it is cut, then slots of equal size.
A slot holds a share of one step. It is broken open before it is written to and sealed after: a rank that is killed in
between leaves a slot that does not verify. With two slots in turn, a step that all ranks have survives every kill: a
rank opens a slot only after a step in which all took part, so the others have sealed the step before.
"""

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimaran.checkpoint.rank_share import Item, RankShare, view_of
from trimaran.checkpoint.tensor_regions import Entry, Index, TensorRegion, Whole

PAGE = 4096
CUT = struct.Struct("=8sQQQI")  # magic, slots, room for a head, room for data, CRC-32 of these
SEAL = struct.Struct(
    "=8sQQQI"
)  # magic, bytes of the head, bytes of the data, sum of the data, CRC-32 of head and these
MAGIC = b"trimaran"
HEAD_SPARE = 64 << 10
"""What a head may take besides the list of items: the progress."""
BLOCK_WORDS = 1 << 17
AT_ONCE = 1 << 30  # bytes of memory that are taken together
DISK_BLOCK = 512  # bytes, in which stat counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a slot holds: the share of `rank` of `world_size` after `step` steps.

    `incarnation` tells apart states of one step that differ: attempt of the run, then how often it went back.
    """

    step: int
    incarnation: tuple[int, int]
    rank: int
    world_size: int
    progress: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCopy:
    """A slot whose head is whole: label and share, and the memory, which nobody has verified yet."""

    label: Label
    share: RankShare
    memory: Tensor
    checksum: int

    def verify(self) -> bool:
        """Return whether the values are what was sealed."""
        return checksum(self.memory) == self.checksum


class MemorySlot:
    """A piece of a rank memory with room for one share."""

    def __init__(self, memory: Tensor, head_room: int) -> None:
        self.memory, self._head_room = memory, head_room
        self.data = memory[head_room:]
        """All the room there is; a share takes the first bytes of it."""

    def open(self) -> None:
        """Break the seal: what the slot held is lost from here on."""
        self._write(0, bytes(SEAL.size))

    def seal(self, label: Label, items: bytes, num_bytes: int) -> None:
        """Declare that `num_bytes` of the data are the share whose items `pack_items` wrote down."""
        head = _pack_label(label) + b"\n" + items
        if SEAL.size + len(head) > self._head_room:
            raise ValueError(f"a head of {len(head)} bytes does not fit into {self._head_room}")
        self._write(SEAL.size, head)
        fields = (MAGIC, len(head), num_bytes, checksum(self.data[:num_bytes]))
        crc = zlib.crc32(head, zlib.crc32(repr(fields).encode()))
        self._write(0, SEAL.pack(*fields, crc))

    def read(self) -> SavedCopy | None:
        """Return what is sealed in here; None when that is nothing, or the head is damaged."""
        magic, head_bytes, num_bytes, total, crc = SEAL.unpack(self._read(0, SEAL.size))
        if magic != MAGIC or SEAL.size + head_bytes > self._head_room or num_bytes > len(self.data):
            return None
        head = self._read(SEAL.size, head_bytes)
        if crc != zlib.crc32(head, zlib.crc32(repr((magic, head_bytes, num_bytes, total)).encode())):
            return None
        label, items = head.split(b"\n", 1)
        share = RankShare(_unpack_items(items), num_bytes)
        return SavedCopy(label=_unpack_label(label), share=share, memory=self.data[:num_bytes], checksum=total)

    def _write(self, offset: int, data: bytes) -> None:
        if data:
            self.memory[offset : offset + len(data)].numpy()[:] = np.frombuffer(data, dtype=np.uint8)

    def _read(self, offset: int, num_bytes: int) -> bytes:
        return self.memory[offset : offset + num_bytes].numpy().tobytes()


class RankMemory:
    """The memory of one place. `fd` stays open with its owner, whatever becomes of this object."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.slots: tuple[MemorySlot, ...] = ()
        self._cut = (0, 0, 0)
        self._open()

    @property
    def num_bytes(self) -> int:
        """How large the rank memory is. It may take less of the node's memory, until `take` has returned."""
        return os.fstat(self.fd).st_size

    @property
    def taken_bytes(self) -> int:
        """What the rank memory takes of the node's memory by now."""
        return os.fstat(self.fd).st_blocks * DISK_BLOCK

    def lay_out(self, num_slots: int, *, num_bytes: int, items_bytes: int, take: bool = True) -> bool:
        """Cut the rank memory into slots for shares of up to `num_bytes`; return whether what was in it is still there.

        It is when the cut is the same. The memory is taken here and now, so that a lack of it is an OSError; without
        `take`, that is left to a call of `take`.
        """
        head = _pages(SEAL.size + items_bytes + HEAD_SPARE)
        cut = (num_slots, head, _pages(num_bytes))
        if cut == self._cut:
            return True
        self.slots, self._cut = (), (0, 0, 0)
        os.ftruncate(self.fd, 0)
        size = PAGE + num_slots * (cut[1] + cut[2])
        os.ftruncate(self.fd, size)
        if take:
            self.take()
        fields = (MAGIC, *cut)
        os.pwrite(self.fd, CUT.pack(*fields, zlib.crc32(repr(fields).encode())), 0)
        self._open()
        return False

    def take(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Take the memory, which is 6 GB a second; a lack of it is an OSError. Stops when `goes_on` says no."""
        size = self.num_bytes
        for start in range(0, size, AT_ONCE):
            if goes_on():
                os.posix_fallocate(self.fd, start, min(AT_ONCE, size - start))

    def kept(self) -> list[tuple[MemorySlot, SavedCopy]]:
        """Return the slots with a whole head, and what they hold."""
        found = [(slot, slot.read()) for slot in self.slots]
        return [(slot, kept) for slot, kept in found if kept is not None]

    @property
    def memory(self) -> Tensor:
        """All of it, to be pinned."""
        return self._memory

    def _open(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self.num_bytes < PAGE:
            return
        magic, *cut, crc = CUT.unpack(os.pread(self.fd, CUT.size, 0))
        num_slots, head, data = cut
        good = magic == MAGIC and crc == zlib.crc32(repr((magic, *cut)).encode())
        if not good or self.num_bytes != PAGE + num_slots * (head + data):
            return
        self._memory = torch.frombuffer(mmap.mmap(self.fd, self.num_bytes), dtype=torch.uint8)
        self._cut = (num_slots, head, data)
        starts = [PAGE + index * (head + data) for index in range(num_slots)]
        self.slots = tuple(MemorySlot(self._memory[start : start + head + data], head) for start in starts)


class MemorySource:
    """A step out of the verified slots of all ranks that kept it; see `pieces.Source`."""

    def __init__(self, shares: Mapping[int, SavedCopy]) -> None:
        """`shares` are by rank; all of one step and incarnation."""
        label = next(iter(shares.values())).label
        self.step, self.progress = label.step, label.progress
        self._memory = {str(rank): kept.memory for rank, kept in shares.items()}
        self.index: Index = index_of({rank: kept.share for rank, kept in shares.items()})

    def read(self, key: str, part: TensorRegion) -> Tensor:
        item = Item(key, self.index[key].whole, part.start, part.size, part.offset, False)
        return view_of(self._memory[part.file], item)


def index_of(shares: Mapping[int, RankShare]) -> Index:
    """Return where every tensor is; the file of a part is its rank."""
    wholes: dict[str, Whole] = {}
    parts: dict[str, list[TensorRegion]] = {}
    for rank, share in shares.items():
        for item in share.items:
            wholes[item.key] = item.whole
            parts.setdefault(item.key, []).append(TensorRegion(item.start, item.size, str(rank), item.offset))
    return {key: Entry(whole, tuple(parts[key])) for key, whole in wholes.items()}


def checksum(data: Tensor) -> int:
    """Return a sum over all of `data`, whose length is a multiple of 8: three times as fast as a CRC.

    It is the CRC-32 of the sums of its blocks, word by word. A flipped bit, a page of zeros or of another step change
    it; words that trade places within a block do not, which no failure of a memory does.
    """
    words = data.view(torch.int64)
    whole = len(words) // BLOCK_WORDS * BLOCK_WORDS
    sums = torch.cat([words[:whole].view(-1, BLOCK_WORDS).sum(1), words[whole:].sum().reshape(1)])
    return zlib.crc32(sums.numpy().tobytes())


def pack_items(items: Iterable[Item]) -> bytes:
    """Return the items of a share as JSON."""
    rows = [(each.key, each.whole.dtype, each.whole.shape, each.start, each.size, each.offset, each.frozen)
            for each in items]  # fmt: skip
    return json.dumps(rows, separators=(",", ":")).encode()


def pack_kept(kept: SavedCopy) -> str:
    """Return what a slot holds, without the values, as text for another rank."""
    head = _pack_label(kept.label) + b"\n" + pack_items(kept.share.items)
    return f"{kept.checksum} {kept.share.num_bytes}\n{head.decode()}"


def unpack_kept(text: str) -> SavedCopy:
    """Return what `pack_kept` wrote down; the memory is empty."""
    numbers, label, items = text.split("\n", 2)
    total, num_bytes = map(int, numbers.split())
    share = RankShare(_unpack_items(items.encode()), num_bytes)
    memory = torch.empty(0, dtype=torch.uint8)
    return SavedCopy(label=_unpack_label(label.encode()), share=share, memory=memory, checksum=total)


def _unpack_items(data: bytes) -> tuple[Item, ...]:
    return tuple(
        Item(key, Whole(dtype, tuple(shape)), tuple(start), tuple(size), offset, frozen)
        for key, dtype, shape, start, size, offset, frozen in json.loads(data)
    )


def _pack_label(label: Label) -> bytes:
    tree = {"step": label.step, "voyage": label.incarnation, "rank": label.rank, "world_size": label.world_size}
    return json.dumps(tree | {"progress": label.progress}, separators=(",", ":")).encode()


def _unpack_label(data: bytes) -> Label:
    tree = json.loads(data)
    attempt, laps = tree.pop("voyage")
    return Label(incarnation=(attempt, laps), **tree)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
