"""Commits a checkpoint whose files are on the disks of several nodes, together on all of them.

The first rank of every node commits the files of its node, and rank 0 commits last. So a step is complete if the head
has it: all other nodes have confirmed their files before. A step that only some of them have is not used.
"""

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trimaran.checkpoint.durable import DurableDisk, report_disk_errors
from trimaran.checkpoint.manifest import Manifest, manifest_bytes, parse_manifest
from trimaran.checkpoint.rank_layout import RankLayout
from trimaran.checkpoint.step_dirs import remove_checkpoint
from trimaran.checkpoint.write_checkpoint import (
    KeyValueStore,
    WriteReport,
    add_manifest,
    describe_files,
    move_into_place,
)
from trimaran.core import UserError

PIECE_CHARACTERS = 4 << 20
TIMEOUT_SECONDS = 3600.0


class NodeCommit:
    """The commit of one checkpoint. Every rank may make one; the first rank of each node calls its methods.

    `key` returns the key of a message in the store, from its kind and the rank that sends it.
    """

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
        self._send(index, manifest)
        others = sorted({*layout.nodes} - {0})
        answers = self._store.wait_get([self._key("committed", rank) for rank in others], TIMEOUT_SECONDS)
        if failed := "; ".join(filter(None, answers)):
            raise OSError(failed)
        self._place(node, index, manifest)

    def follow(self, node: str, rank: int) -> None:
        """Commit the files of `node`, as its first rank, and tell rank 0 whether that worked."""
        failed = ""
        try:
            if (contents := self._receive()) is not None:
                self._place(node, *contents)
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

    def _send(self, index: bytes, manifest: Manifest) -> None:
        text = json.dumps({"index": index.decode(), "manifest": manifest_bytes(manifest).decode()})
        packed = base64.b64encode(zlib.compress(text.encode(), 1)).decode()
        pieces = [packed[at : at + PIECE_CHARACTERS] for at in range(0, len(packed), PIECE_CHARACTERS)]
        for number, piece in enumerate(pieces):
            self._store.set(self._key(f"contents-{number}", 0), piece)
        self._num_pieces = len(pieces)
        self._store.set(self._key("contents", 0), str(len(pieces)))

    def _receive(self) -> tuple[bytes, Manifest] | None:
        """Return the index and manifest that rank 0 sends; None if there is nothing to commit."""
        count = int(self._store.wait_get([self._key("contents", 0)], TIMEOUT_SECONDS)[0])
        if not count:
            return None
        keys = [self._key(f"contents-{number}", 0) for number in range(count)]
        packed = "".join(self._store.wait_get(keys, TIMEOUT_SECONDS))
        fields = json.loads(zlib.decompress(base64.b64decode(packed)))
        return fields["index"].encode(), parse_manifest(self._final, fields["manifest"].encode())

    @property
    def messages(self) -> list[str]:
        """The keys of the messages that rank 0 has sent."""
        return [self._key("contents", 0), *(self._key(f"contents-{each}", 0) for each in range(self._num_pieces or 0))]
