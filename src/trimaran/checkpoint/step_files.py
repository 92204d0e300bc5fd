"""The files of a checkpoint on disk, mapped into memory, and the nodes that have them. Imports no torch."""

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from trimaran.checkpoint.manifest import (
    INDEX,
    MAX_INDEX_BYTES,
    Damage,
    DamagedError,
    Manifest,
    read_limited,
    read_manifest,
    unreadable,
)
from trimaran.checkpoint.shard_index import parse_index
from trimaran.core import UserError, open_regular_fd
from trimaran.parallel import VALUE_BYTES, TensorIndex, TensorMeta, TensorRegion

MAX_NAMED_FILES = 4


class MissingFilesError(UserError):
    """Files of a checkpoint, `missing` by node, are on nodes that are not here. The checkpoint is not damaged."""

    missing: Mapping[str, Sequence[str]]


def files_here(folder: Path, manifest: Manifest) -> list[str]:
    """Return the files of the manifest that are in `folder` with their length."""
    return [name for name, record in manifest.files.items() if _size(folder / name) == record.bytes]


def files_elsewhere(folder: Path, manifest: Manifest) -> dict[str, list[str]]:
    """Return the files of nodes none of whose files are in `folder`, by node: they are on the disks of these nodes."""
    return {
        node: names for node, names in manifest.nodes.items() if not any(_size(folder / each) >= 0 for each in names)
    }


def nodes_of(manifest: Manifest, names: Iterable[str]) -> dict[str, list[str]]:
    """Return which node wrote each of `names`; files that the manifest assigns to no node are those of the head."""
    written_by = {name: node for node, files in manifest.nodes.items() for name in files}
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(written_by.get(name, "the head"), []).append(name)
    return found


def missing_files_error(
    folder: Path, step: int, missing: Mapping[str, Sequence[str]], *, complete: Sequence[int] | None = None
) -> MissingFilesError:
    """Return the error for files on absent nodes, by node. `complete`: older steps with all files; None: unknown."""
    named = []
    for node, files in missing.items():
        more = f" and {len(files) - MAX_NAMED_FILES} more" if len(files) > MAX_NAMED_FILES else ""
        named.append(f"{', '.join(files[:MAX_NAMED_FILES])}{more} on {node}")
    what = f"files of the checkpoint of step {step} are not here: {'; '.join(named)}"
    fix = f"start {', '.join(missing)} again with its disk, or copy its files here; or use a RUN on a shared disk"
    if complete:
        what += f"; the newest complete step is {max(complete)}"
        fix += f"; to continue from step {max(complete)}, move {folder.name} out of the head's checkpoints"
    elif complete is not None:
        what += "; no older checkpoint is complete"
    error = MissingFilesError("L025", what, where=str(folder), fix=fix)
    error.missing = missing
    return error


def _size(path: Path) -> int:
    """Return the length of a file; -1 if there is none."""
    try:
        return path.lstat().st_size
    except OSError:
        return -1


class StepFiles:
    """A checkpoint whose manifest is valid and whose index fits the files' sizes; `verify` checks their contents."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        self._maps: dict[str, np.ndarray] = {}
        record = self.manifest.files[INDEX]
        try:
            text = read_limited(folder / INDEX, MAX_INDEX_BYTES)
        except (OSError, ValueError) as error:
            raise DamagedError(folder, [unreadable(INDEX, error)]) from None
        if len(text) != record.bytes or sha256(text).hexdigest() != record.sha256:
            raise DamagedError(folder, [Damage(INDEX, "does not match the manifest")])
        try:
            sizes = {name: each.bytes for name, each in self.manifest.files.items()}
            self.index: TensorIndex = parse_index(text, sizes)
        except ValueError as error:
            raise DamagedError(folder, [Damage(INDEX, f"is invalid: {error}")]) from None

    def bytes_of(self, meta: TensorMeta, region: TensorRegion) -> np.ndarray:
        """Return the bytes of a region, as a view of the mapped file: pages are read when they are accessed."""
        begin = region.offset
        name = region.file
        if name not in self._maps:
            try:
                fd = open_regular_fd(self.folder / name)
            except OSError as error:
                if elsewhere := files_elsewhere(self.folder, self.manifest):
                    raise missing_files_error(self.folder, self.manifest.step, elsewhere) from None
                raise DamagedError(self.folder, [unreadable(name, error)]) from None
            try:
                size = os.fstat(fd).st_size
                if size != self.manifest.files[name].bytes:
                    raise DamagedError(self.folder, [Damage(name, f"has {size:,} bytes")])
                # Copy-on-write: torch wants writable memory, and the file must not change.
                self._maps[name] = np.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_COPY), np.uint8)
            finally:
                os.close(fd)
        return self._maps[name][begin : begin + region.num_values * VALUE_BYTES[meta.dtype]]
