"""Writes a checkpoint: each rank its own files into a draft, then rank 0 declares the whole of it complete."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trimaran.checkpoint.durable import CHUNK_BYTES, OLD, DurableDisk, naming_the_disk, write_file
from trimaran.checkpoint.manifest import INDEX, MANIFEST, FileRecord, Manifest, manifest_bytes, read_manifest
from trimaran.checkpoint.rank_share import ALIGNMENT, Item, RankShare
from trimaran.checkpoint.shard_index import ShardLayout, index_bytes, layout_of
from trimaran.checkpoint.step_dirs import drop, looks_complete, refuse
from trimaran.core import UserError


class Post(Protocol):
    """How ranks that write together meet."""

    def tell(self, key: str, text: str) -> None:
        """Say `text` to whoever asks for `key`, now or later."""
        ...

    def hear(self, keys: Sequence[str], seconds: float) -> list[str]:
        """Return what was said for each of `keys`. Raises TimeoutError when one is still silent after `seconds`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a rank wrote: its files, what is where in them, and how many bytes really went to the disk."""

    rank: int
    files: dict[str, FileRecord]
    layout: ShardLayout
    written_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    def text(self, *, brief: bool = False) -> str:
        """Return it as JSON. `brief` leaves out the layout's rows, for those who have heard them: see `Clerk`."""
        fields = asdict(self) | {"layout": self.layout.digest, "rows": None if brief else self.layout.rows}
        return json.dumps(fields, separators=(",", ":"))


class Clerk:
    """Reads receipts, and remembers the layouts that it has seen in full."""

    def __init__(self) -> None:
        self._layouts: dict[int, ShardLayout] = {}

    def read(self, text: str) -> Receipt:
        """Return the receipt that `text` was made of."""
        fields = json.loads(text)
        files = {name: FileRecord(**record) for name, record in fields["files"].items()}
        rank, digest, rows = fields["rank"], fields["layout"], fields.pop("rows")
        if rows is not None:
            self._layouts[rank] = ShardLayout(digest, tuple(rows))
        layout = self._layouts.get(rank)
        if layout is None or layout.digest != digest:
            raise AssertionError(f"rank {rank} is brief about a layout that nobody has seen")
        return Receipt(rank=rank, files=files, layout=layout, written_bytes=fields["written_bytes"])


def write_share(
    draft: Path, rank: int, share: RankShare, memory: memoryview, *, previous: Path | None, disk: DurableDisk
) -> Receipt:
    """Write what `rank` has to write into the folder `draft`, and return when it is on the disk itself.

    `memory` is as `copy_in` left it. What is frozen, and the same in the checkpoint `previous`, is linked instead.
    Raises UserError K006 when the disk refuses.
    """
    rows: list[Any] = []
    files: dict[str, FileRecord] = {}
    written_bytes = 0
    with naming_the_disk(draft):
        disk.make_folder(draft)
        for name, items in _files(rank, share):
            header = _header(items)
            begin, end = items[0].offset, items[-1].offset + items[-1].num_bytes
            content = (memoryview(header), memory[begin:end])
            record = _linked(draft / name, content, previous, disk) if items[0].frozen else None
            if record is None:
                record = _write(draft / name, content, disk)
                written_bytes += record.bytes
            files[name] = record
            rows += [_row(item, name, len(header) - begin) for item in items]
    return Receipt(rank=rank, files=files, layout=layout_of(rows), written_bytes=written_bytes)


def commit(draft: Path, final: Path, receipts: Sequence[Receipt], about: Manifest, disk: DurableDisk) -> Manifest:
    """Make the complete checkpoint `final` of what the ranks wrote into `draft`, and return its manifest.

    `about` has everything but the files. A complete checkpoint that is there already stays, and the draft is dropped.
    Raises UserError K006 when the disk refuses, or when a file is not as long as its writer said.
    """
    with naming_the_disk(draft):
        disk.make_folder(draft)
        index = index_bytes(tuple(receipt.layout for receipt in receipts))
        files = {name: record for receipt in receipts for name, record in receipt.files.items()}
        for name, record in files.items():
            if (size := (draft / name).stat().st_size) != record.bytes:
                raise OSError(None, f"{name} has {size:,} bytes instead of {record.bytes:,}", str(draft))
        write_file(draft / INDEX, memoryview(index), disk)
        files[INDEX] = FileRecord(len(index), sha256(index).hexdigest())
        manifest = replace(about, files=dict(sorted(files.items())))
        write_file(draft / MANIFEST, memoryview(manifest_bytes(manifest)), disk)
        disk.sync_folder(draft)
        if looks_complete(final):
            drop(draft, disk)
            return read_manifest(final)
        if final.is_symlink() or final.exists():
            refuse(final, "it was there, and not complete, when its step was saved again", disk)
        disk.rename(draft, final)
        # Its own name, and for the first one that of the folder that all of them are in.
        disk.sync_folder(final.parent)
        disk.sync_folder(final.parent.parent)
    return manifest


def _files(rank: int, share: RankShare) -> Iterator[tuple[str, list[Item]]]:
    """Yield name and items of each file that is not empty."""
    for frozen, suffix in ((False, ""), (True, ".frozen")):
        if items := [item for item in share.items if item.frozen == frozen]:
            yield f"rank-{rank:05d}{suffix}.safetensors", items


def _header(items: Sequence[Item]) -> bytes:
    """Return the head of a safetensors file. It knows nothing of the step, so that equal tensors make equal files."""
    begin = items[0].offset
    names: dict[str, Any] = {"__metadata__": {"format": "trimaran 1"}}
    for item in items:
        at = item.offset - begin
        place = {"dtype": item.whole.dtype, "shape": item.size, "data_offsets": [at, at + item.num_bytes]}
        names[f"{item.key}@{','.join(map(str, item.start))}"] = place
    text = json.dumps(names, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _row(item: Item, file: str, shift: int) -> list[Any]:
    return [item.key, item.whole.dtype, item.whole.shape, item.start, item.size, file, item.offset + shift]


def _write(path: Path, content: Sequence[memoryview], disk: DurableDisk) -> FileRecord:
    total = sha256()
    num_bytes = 0
    fd = disk.create(path)
    try:
        for chunk in _chunks(content):
            total.update(chunk)
            disk.write(fd, chunk)
            num_bytes += len(chunk)
        disk.sync(fd)
    finally:
        os.close(fd)
    return FileRecord(num_bytes, total.hexdigest())


def _linked(path: Path, content: Sequence[memoryview], previous: Path | None, disk: DurableDisk) -> FileRecord | None:
    """Return the record of a link to the file in `previous` that holds `content`, None when there is none or no links.

    The file itself is compared, not its sum alone: what went bad on the disk is not handed on.
    """
    if previous is None:
        return None
    try:
        record = read_manifest(previous).files.get(path.name)
        if record is None or not _same(previous / path.name, content):
            return None
        disk.link(previous / path.name, path)
    except (OSError, UserError):
        return None
    return record


def _same(path: Path, content: Sequence[memoryview]) -> bool:
    with os.fdopen(os.open(path, OLD), "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != sum(map(len, content)):
            return False
        for chunk in _chunks(content):
            there = file.read(len(chunk))
            if len(there) != len(chunk) or not np.array_equal(np.frombuffer(there, np.uint8), np.asarray(chunk)):
                return False
    return True


def _chunks(content: Sequence[memoryview]) -> Iterator[memoryview]:
    for each in content:
        for begin in range(0, len(each), CHUNK_BYTES):
            yield each[begin : begin + CHUNK_BYTES]
