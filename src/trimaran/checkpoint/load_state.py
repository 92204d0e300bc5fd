"""Fills the shards of a rank from a saved state, whatever the sharding of that one was.

Large files are read once: each part is verified in memory, then its values are copied to the shards. No byte is copied
before the checksum of its part is right. What is copied from the parts before a damaged one is overwritten when another
checkpoint is loaded.
"""

import errno
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trimaran.checkpoint.durable import CHUNK_BYTES, read_blocks
from trimaran.checkpoint.file_parts import BLOCK_BYTES, MAX_DIRECT_CALLS, ThreadBuffer, ThreadProgress, map_in_threads
from trimaran.checkpoint.manifest import Damage, FileRecord, unreadable
from trimaran.checkpoint.shard_index import Overlap, overlaps, window
from trimaran.checkpoint.step_files import StepFiles
from trimaran.core import SpecialFileError, UserError, did_you_mean, open_regular_fd
from trimaran.parallel import TORCH_DTYPES, CheckpointSource, Gather, SplitWeight, TensorRegion, TensorShard, meta_of

MAX_NAMED_TENSORS = 5
SAME_MODEL = "resume with the model and optimizer that it was saved with"
ANOTHER_CHECKPOINT = "resume from another checkpoint: `trimaran checkpoints verify RUN` says which are intact"
MatchedShard = tuple[TensorShard, list[Overlap]]
MAX_PART_BYTES = 256 << 20  # files of larger parts, which nobody writes, are verified and read like files of one part


class DiskSource:
    """The state in a step directory. Manifest and index are verified here; call `verify` first for the rest."""

    def __init__(self, path: Path) -> None:
        self._files = StepFiles(path)
        self.path, self.manifest, self.index = path, self._files.manifest, self._files.index
        self.step, self.progress = self.manifest.step, self.manifest.progress

    def read(self, key: str, region: TensorRegion) -> Tensor:
        """Return the values of a region, in its shape. Pages are read from the disk when they are accessed."""
        meta = self.index[key].meta
        raw = self._files.bytes_of(meta, region)
        return torch.from_numpy(raw).view(TORCH_DTYPES[meta.dtype]).view(region.size)


def fill_shards(shards: Sequence[TensorShard], source: CheckpointSource) -> None:
    """Copy the values of every shard from `source`, bit for bit. All shards are checked before the first is written.

    Raises UserError if the source lacks a tensor, has it with another shape or dtype, or has only some of its values.
    """
    fill_matched(match_shards(shards, source), source, lambda: None, num_threads=1)


def match_shards(shards: Sequence[TensorShard], source: CheckpointSource) -> list[MatchedShard]:
    """Return each shard with the regions of `source` that cover it, and overlaps. Raises as `fill_shards` does."""
    matched: list[MatchedShard] = []
    for shard in shards:
        if not all(shard.shape):
            matched.append((shard, []))
            continue
        wants, entry = meta_of(shard), source.index.get(shard.key)
        if entry is None:
            what = f"does not have {shard.key}{did_you_mean(shard.key, source.index)}"
            raise _mismatch("K001", what, shard.key, source, SAME_MODEL)
        has = entry.meta
        if wants.shape != has.shape:
            sizes = [" x ".join(map(str, each)) or "a scalar" for each in (has.shape, wants.shape)]
            what = f"has {shard.key} as {sizes[0]}, this run wants {sizes[1]}"
            raise _mismatch("K003", what, shard.key, source, SAME_MODEL)
        if wants.dtype != has.dtype:
            what = f"has {shard.key} as {has.dtype}, this run wants {wants.dtype}"
            fix = "resume with the precision and optimizer that it was saved with"
            raise _mismatch("K002", what, shard.key, source, fix)
        found = overlaps(entry.regions, shard.start, tuple(shard.tensor.shape))
        num_values = sum(prod(extent) for _, _, extent in found)
        if num_values != shard.tensor.numel():
            what = f"has {num_values:,} of the {shard.tensor.numel():,} values of {shard.key} that this run needs"
            raise _mismatch("K004", what, shard.key, source, ANOTHER_CHECKPOINT)
        matched.append((shard, found))
    return matched


def cuda_device_of(shards: Iterable[TensorShard]) -> int | None:
    """Return the device that threads must set (or they use GPU 0) before they fill these shards; None for the CPU."""
    return torch.cuda.current_device() if any(shard.tensor.is_cuda for shard in shards) else None


def fill_matched(
    matched: Sequence[MatchedShard],
    source: CheckpointSource,
    report_progress: Callable[[], None],
    *,
    num_threads: int,
) -> None:
    """Copy the values that `match_shards` found, in threads. This thread reports progress as tensors are copied."""
    device, progress = cuda_device_of(shard for shard, _ in matched), ThreadProgress(report_progress)

    def fill(each: MatchedShard) -> None:
        shard, regions = each
        if device is not None:
            torch.cuda.set_device(device)  # per thread
        with torch.no_grad():  # per thread, too
            for region, start, size in regions:
                values = source.read(shard.key, region)[window(start, size, region.start)]
                shard.tensor[window(start, size, shard.start)].copy_(values)
        progress.count()

    map_in_threads(fill, matched, num_threads=num_threads, while_waiting=progress.report)


def refuse_unused_tensors(
    shards: Sequence[TensorShard], source: CheckpointSource, *, gather: Gather, allowed: Sequence[str] = ()
) -> None:
    """Raise UserError if no rank loads a tensor of `source`, but for `allowed` prefixes. Every rank must call it."""
    keys = sorted(source.index)
    used_anywhere = np.bitwise_or.reduce(gather(packed_bits(keys, {shard.key for shard in shards})), axis=0)
    is_used = np.unpackbits(used_anywhere.view(np.uint8), count=len(keys))
    unused = [key for key, used in zip(keys, is_used, strict=True) if not used and not key.startswith(tuple(allowed))]
    if unused:
        some = ", ".join(unused[:MAX_NAMED_TENSORS]) + (", ..." if len(unused) > MAX_NAMED_TENSORS else "")
        what = f"has {len(unused)} tensors that this run does not use: {some}"
        raise _mismatch("K005", what, unused[0], source, SAME_MODEL)


def packed_bits(names: Sequence[str], given: Collection[str]) -> np.ndarray:
    """Return which of `names` are given, as bits in int64 words: there may be thousands of names."""
    bits = np.packbits(np.array([name in given for name in names], dtype=bool))
    words = np.zeros(-(-len(bits) // 8), dtype=np.int64)
    words.view(np.uint8)[: len(bits)] = bits
    return words


def _mismatch(code: str, what: str, key: str, source: CheckpointSource, fix: str) -> UserError:
    return UserError(code, f"the checkpoint of step {source.step} {what}", where=key, fix=fix)


@dataclass(frozen=True, slots=True, eq=False)
class ByteCopy:
    """Bytes of a file from `begin` on that are the values of `target`, which is flat unless they are in one part."""

    begin: int
    target: Tensor | SplitWeight

    @property
    def end(self) -> int:
        return self.begin + self.target.nbytes


def has_parts(record: FileRecord) -> bool:
    """Return whether a file is read in parts."""
    return 0 < record.part_bytes <= MAX_PART_BYTES and record.part_bytes % BLOCK_BYTES == 0


class PartLoader:
    """Fills the shards of a rank from the files of a checkpoint that have parts."""

    def __init__(self, source: DiskSource, matched: Sequence[MatchedShard]) -> None:
        """`matched` is what `match_shards` returned for `source`."""
        self._source, self._copies = source, defaultdict[str, list[ByteCopy]](list)
        self._device = cuda_device_of(shard for shard, _ in matched)
        self.rest: list[MatchedShard] = []
        """What is left to fill: regions that are not consecutive bytes in the file and in the shard."""
        for shard, regions in matched:
            if left := [rest for each in regions for rest in self._add(shard, each)]:
                self.rest.append((shard, left))

    def run(self, files: Iterable[str], report_progress: Callable[[], None], *, num_threads: int) -> list[Damage]:
        """Verify `files` and whatever else these shards need, and fill the shards. Returns what is damaged."""
        records, own = self._source.manifest.files, {*files}
        parts = [(name, number) for name, record in records.items() if has_parts(record)
                 for number in range(len(record.checksums))]  # fmt: skip
        needed = [each for each in parts if each[0] in own or self._copies_of(*each)]
        self._progress, self._buffer = ThreadProgress(report_progress), ThreadBuffer()
        self._readers = threading.BoundedSemaphore(MAX_DIRECT_CALLS)
        found = map_in_threads(self._load, needed, num_threads=num_threads, while_waiting=self._progress.report)
        return [*{damage.file: damage for damage in reversed(found) if damage}.values()]

    def _add(self, shard: TensorShard, overlap: Overlap) -> list[Overlap]:
        """Add what a shard needs of a region, and return what cannot be copied from the parts of the file."""
        region, start, size = overlap
        record, width = self._source.manifest.files[region.file], shard.tensor.element_size()
        if not has_parts(record) or size[1:] != region.size[1:] or region.offset % width:
            return [overlap]
        target, row_bytes = shard.tensor[window(start, size, shard.start)], prod(size[1:]) * width
        begin = region.offset + ((start[0] - region.start[0]) * row_bytes if start else 0)
        if isinstance(target, Tensor) and target.is_contiguous():
            self._copies[region.file].append(ByteCopy(begin, target.view(-1)))
            return []
        if not size:
            return [overlap]
        rest, copied = [], 0
        part_bytes = record.part_bytes
        for part in range(begin // part_bytes * part_bytes, begin + size[0] * row_bytes, part_bytes):
            # The rows that are within this part: they follow each other in the file from byte `begin` on.
            first = max(0, -(-(part - begin) // row_bytes))
            last = min(size[0], (part + part_bytes - begin) // row_bytes)
            if first < last:
                self._copies[region.file].append(ByteCopy(begin + first * row_bytes, target[first:last]))
                rest.append((copied, first))
                copied = last
        rest.append((copied, size[0]))
        return [(region, (start[0] + low, *start[1:]), (high - low, *size[1:])) for low, high in rest if low < high]

    def _copies_of(self, name: str, number: int) -> list[ByteCopy]:
        """Return the copies that overlap a part."""
        begin, end = self._source.manifest.files[name].range_of(number)
        return [each for each in self._copies.get(name, ()) if each.begin < end and begin < each.end]

    def _load(self, part: tuple[str, int]) -> Damage | None:
        name, number = part
        record = self._source.manifest.files[name]
        try:
            try:
                found = self._read(name, number, os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL or isinstance(error, SpecialFileError):
                    raise
                found = self._read(name, number)  # this file system has no direct I/O
        except FileNotFoundError:
            return Damage(name, "is missing")
        except OSError as error:
            return unreadable(name, error)
        if isinstance(found, Damage):
            return found
        memory, checksum = found
        if checksum != record.part_sha256[number]:
            return Damage(name, "is not what was written: its checksum is wrong")
        if self._device is not None:
            torch.cuda.set_device(self._device)  # per thread
        values, begin = torch.frombuffer(memory, dtype=torch.uint8), number * record.part_bytes
        with torch.no_grad():
            for copy in self._copies_of(name, number):
                first, last = max(copy.begin, begin), min(copy.end, begin + len(values))
                source = values[first - begin : last - begin].view(copy.target.dtype)
                if copy.target.ndim == 1:
                    width = copy.target.element_size()
                    copy.target[(first - copy.begin) // width : (last - copy.begin) // width].copy_(source)
                else:
                    copy.target.copy_(source.view(copy.target.shape))
        return None

    def _read(self, name: str, number: int, flags: int = 0) -> tuple[memoryview, str] | Damage:
        """Return the bytes of a part, in the buffer of this thread, and their SHA-256."""
        fd = open_regular_fd(self._source.path / name, os.O_RDONLY | flags)
        record = self._source.manifest.files[name]
        begin, end = record.range_of(number)
        try:
            if (size := os.fstat(fd).st_size) != record.bytes:
                return Damage(name, f"has {size:,} bytes instead of {record.bytes:,}")
            buffer, digest = self._buffer.of(record.part_bytes), sha256()
            for at in range(begin, end, CHUNK_BYTES):
                chunk, num_bytes = buffer[at - begin : at - begin + CHUNK_BYTES], min(CHUNK_BYTES, end - at)
                with self._readers:
                    read_blocks(fd, chunk, at, num_bytes)
                digest.update(chunk[:num_bytes])
                self._progress.count()
        finally:
            os.close(fd)
        return buffer[: end - begin], digest.hexdigest()
