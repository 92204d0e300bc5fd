"""Writes a checkpoint: each rank writes its own files to a draft, then rank 0 commits the draft.

If every node has a disk of its own, the first rank of every node commits the files of its node, and rank 0 commits
last. So a step is complete if the head has it: all other nodes have confirmed their files before. A step that only some
of them have is not used.
"""

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from trimaran.checkpoint.durable import DurableDisk, report_disk_errors, write_file
from trimaran.checkpoint.file_parts import BLOCK_BYTES, has_content, is_large, write_content
from trimaran.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    FileRecord,
    Manifest,
    manifest_bytes,
    parse_manifest,
    parse_record,
    read_manifest,
)
from trimaran.checkpoint.rank_layout import RankLayout
from trimaran.checkpoint.shard_index import ShardLayout, index_bytes, is_compact, layout_of
from trimaran.checkpoint.step_dirs import looks_complete, refuse, remove_checkpoint
from trimaran.core import UserError
from trimaran.parallel import ALIGNMENT, RankShare, ShareItem

PIECE_CHARACTERS = 4 << 20  # of a message to the other nodes
TIMEOUT_SECONDS = 3600.0  # for their answers


class KeyValueStore(Protocol):
    """How the savers of all ranks exchange messages."""

    def set(self, key: str, text: str) -> None: ...

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        ...

    def wait_get(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        """Return the text of each of `keys`. Raises TimeoutError if one is not set within `timeout_seconds`."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete messages that nobody reads any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """What a rank wrote: files, layout, bytes written and not linked, and its node if that has a disk of its own."""

    rank: int
    files: dict[str, FileRecord]
    layout: ShardLayout
    written_bytes: int
    node: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    def text(self, *, brief: bool = False) -> str:
        """Return the report as JSON. `brief` omits the rows of the layout, if the reader has them already."""
        files = {name: record.as_dict() for name, record in self.files.items()}
        rows = None if brief else self.layout.rows
        fields = asdict(self) | {"files": files, "layout": self.layout.digest, "rows": rows}
        return json.dumps(fields, separators=(",", ":"))


class WriteReportParser:
    """Parses reports, and remembers the layout of each rank for brief reports."""

    def __init__(self) -> None:
        self._layouts: dict[int, ShardLayout] = {}

    def parse(self, text: str) -> WriteReport:
        """Return the report that `WriteReport.text` encoded."""
        fields = json.loads(text)
        files = {name: parse_record(record) for name, record in fields["files"].items()}
        rank, digest, rows = fields["rank"], fields["layout"], fields.pop("rows")
        if rows is not None:
            self._layouts[rank] = ShardLayout(digest, tuple(rows))
        layout = self._layouts.get(rank)
        if layout is None or layout.digest != digest:
            raise AssertionError(f"rank {rank} sent a brief report before its layout")
        size, node = fields["written_bytes"], fields["node"]
        return WriteReport(rank=rank, files=files, layout=layout, written_bytes=size, node=node)


def write_share(
    draft: Path, rank: int, share: RankShare, memory: memoryview, *, previous: Path | None, disk: DurableDisk
) -> WriteReport:
    """Write the share of `rank` to the folder `draft`, and return when it is durable and has been read back.

    `memory` is filled by `copy_to_memory`. Frozen tensors that are equal in the checkpoint `previous` are linked.
    Raises UserError K006 on a disk error, or if what is read back is not what was written.
    """
    rows: list[Any] = []
    files: dict[str, FileRecord] = {}
    written_bytes = 0
    with report_disk_errors(draft):
        disk.make_folder(draft)
        for frozen, suffix in ((False, ""), (True, ".frozen")):
            items = [item for item in share.items if item.frozen == frozen]
            if not items:
                continue
            name = f"rank-{rank:05d}{suffix}.safetensors"
            header = _header(items)
            begin, end = items[0].offset, items[-1].offset + items[-1].num_bytes
            content = (memoryview(header), memory[begin:end])
            record = _link_previous(draft / name, content, previous, disk) if frozen else None
            if record is None:
                record = write_content(draft / name, content, disk)
                written_bytes += record.bytes
            files[name] = record
            shift = len(header) - begin
            rows += [
                [item.key, item.meta.dtype, item.meta.shape, item.start, item.size, name, item.offset + shift]
                for item in items
            ]
    return WriteReport(rank=rank, files=files, layout=layout_of(rows), written_bytes=written_bytes)


def commit(draft: Path, final: Path, reports: Sequence[WriteReport], manifest: Manifest, disk: DurableDisk) -> Manifest:
    """Turn the files that the ranks wrote to `draft` into the complete checkpoint `final`; return its manifest.

    `manifest` has everything but the files. If `final` is already complete it stays, and the draft is removed.
    Raises UserError K006 on a disk error, or if a file does not have the reported length.
    """
    index, manifest = describe_files(reports, manifest)
    with report_disk_errors(draft):
        add_manifest(draft, index, manifest, [name for name in manifest.files if name != INDEX], disk)
        if looks_complete(final):
            remove_checkpoint(draft, disk)
            return read_manifest(final)
        if final.is_symlink() or final.exists():
            refuse(final, "it was incomplete when its step was saved again", disk)
        move_into_place(draft, final, disk)
    return manifest


def describe_files(reports: Sequence[WriteReport], manifest: Manifest) -> tuple[bytes, Manifest]:
    """Return the index of what the ranks wrote, and `manifest` with the files."""
    index = index_bytes(tuple(report.layout for report in reports))
    files = {name: record for report in reports for name, record in report.files.items()}
    files[INDEX] = FileRecord(len(index), sha256(index).hexdigest())
    compact = is_compact([report.layout for report in reports])
    return index, replace(manifest, files=dict(sorted(files.items())), compact_index=compact)


def add_manifest(draft: Path, index: bytes, manifest: Manifest, names: Sequence[str], disk: DurableDisk) -> None:
    """Add index and manifest to a draft that has the files `names`. Raises OSError if one has not its length."""
    disk.make_folder(draft)
    for name in names:
        if (size := (draft / name).stat().st_size) != (expected := manifest.files[name].bytes):
            raise OSError(None, f"{name} has {size:,} bytes instead of {expected:,}", str(draft))
    write_file(draft / INDEX, memoryview(index), disk)
    write_file(draft / MANIFEST, memoryview(manifest_bytes(manifest)), disk)
    disk.sync_folder(draft)


def move_into_place(draft: Path, final: Path, disk: DurableDisk) -> None:
    """Rename a complete draft, and return when the name of the checkpoint is durable."""
    disk.rename(draft, final)
    disk.sync_folder(final.parent)
    disk.sync_folder(final.parent.parent)  # for the first one: the name of the folder of all checkpoints


def _header(items: Sequence[ShareItem]) -> bytes:
    """Return the header of a safetensors file. It does not name the step, so that equal tensors make equal files."""
    begin = items[0].offset
    names: dict[str, Any] = {"__metadata__": {"format": "trimaran 1"}}
    for item in items:
        at = item.offset - begin
        fields = {"dtype": item.meta.dtype, "shape": item.size, "data_offsets": [at, at + item.num_bytes]}
        names[f"{item.key}@{','.join(map(str, item.start))}"] = fields
    text = json.dumps(names, separators=(",", ":")).encode()
    is_direct = is_large(items[-1].offset + items[-1].num_bytes - begin)
    text += b" " * (-(8 + len(text)) % (BLOCK_BYTES if is_direct else ALIGNMENT))
    return len(text).to_bytes(8, "little") + text


def _link_previous(
    path: Path, content: Sequence[memoryview], previous: Path | None, disk: DurableDisk
) -> FileRecord | None:
    """Link the file in `previous` if it holds `content`, and return its record; None if it cannot be linked."""
    # The contents of the file are compared, not only its checksum, so that damage on the disk is not passed on.
    if previous is None:
        return None
    try:
        record = read_manifest(previous).files.get(path.name)
        if record is None or not has_content(previous / path.name, content, record, disk):
            return None
        disk.link(previous / path.name, path)
    except (OSError, UserError):
        return None
    return record


class NodeCommit:
    """The commit of a checkpoint by the first rank of each node. `key` makes a message's key of its kind and rank."""

    def __init__(
        self, draft: Path, final: Path, store: KeyValueStore, key: Callable[[str, int], str], disk: DurableDisk
    ) -> None:
        self._draft, self._final, self._store, self._key, self._disk = draft, final, store, key, disk
        self._num_pieces: int | None = None
        self._is_placed = False

    def lead(self, node: str, reports: Sequence[WriteReport], manifest: Manifest, layout: RankLayout) -> None:
        """Commit on all nodes, as rank 0 on `node`. Raises if a node could not: then no node may keep it."""
        index, manifest = describe_files(reports, manifest)
        nodes: dict[str, list[str]] = {}
        for report in reports:
            nodes.setdefault(report.node, []).extend(sorted(report.files))
        manifest = replace(manifest, nodes=nodes)
        text = json.dumps({"index": index.decode(), "manifest": manifest_bytes(manifest).decode()})
        packed = base64.b64encode(zlib.compress(text.encode(), 1)).decode()
        pieces = [packed[at : at + PIECE_CHARACTERS] for at in range(0, len(packed), PIECE_CHARACTERS)]
        for number, piece in enumerate(pieces):
            self._store.set(self._key(f"contents-{number}", 0), piece)
        self._num_pieces = len(pieces)
        self._store.set(self._key("contents", 0), str(len(pieces)))
        others = sorted({*layout.nodes} - {0})
        answers = self._store.wait_get([self._key("committed", rank) for rank in others], TIMEOUT_SECONDS)
        if failed := "; ".join(filter(None, answers)):
            raise OSError(failed)
        self._place(node, index, manifest)

    def follow(self, node: str, rank: int) -> None:
        """Commit the files of `node`, as its first rank, and tell rank 0 whether that worked."""
        failed = ""
        try:
            count = int(self._store.wait_get([self._key("contents", 0)], TIMEOUT_SECONDS)[0])
            if count:  # else there is nothing to commit
                keys = [self._key(f"contents-{number}", 0) for number in range(count)]
                packed = "".join(self._store.wait_get(keys, TIMEOUT_SECONDS))
                fields = json.loads(zlib.decompress(base64.b64decode(packed)))
                manifest = parse_manifest(self._final, fields["manifest"].encode())
                self._place(node, fields["index"].encode(), manifest)
        except (OSError, UserError, ValueError) as error:
            failed = f"{node}: {error.what if isinstance(error, UserError) else error}"
        self._store.set(self._key("committed", rank), failed)

    def abandon(self) -> None:
        """Remove what was written here. Rank 0 also tells nodes that still wait for the contents."""
        with suppress(OSError):  # a draft that remains is removed at the next start
            if self._draft.exists():
                remove_checkpoint(self._draft, self._disk)
            if self._is_placed:
                remove_checkpoint(self._final, self._disk)

    def tell_failed(self) -> None:
        """Tell the other nodes, as rank 0, that there is nothing to commit, unless they have got the contents."""
        if self._num_pieces is None:
            self._num_pieces = 0
            self._store.set(self._key("contents", 0), "0")

    def _place(self, node: str, index: bytes, manifest: Manifest) -> None:
        with report_disk_errors(self._draft):
            add_manifest(self._draft, index, manifest, manifest.nodes.get(node, []), self._disk)
            if self._final.is_symlink() or self._final.exists():
                remove_checkpoint(self._final, self._disk)  # of an attempt that ended before all nodes had committed
            self._is_placed = True
            move_into_place(self._draft, self._final, self._disk)

    @property
    def messages(self) -> list[str]:
        """The keys of the messages that rank 0 has sent."""
        return [self._key("contents", 0), *(self._key(f"contents-{each}", 0) for each in range(self._num_pieces or 0))]
