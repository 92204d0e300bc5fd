"""The files of a checkpoint on disk, mapped into memory. Imports no torch."""

import mmap
import os
from hashlib import sha256
from pathlib import Path

import numpy as np

from trimaran.checkpoint.manifest import (
    INDEX,
    MAX_INDEX_BYTES,
    Damage,
    DamagedError,
    read_limited,
    read_manifest,
    unreadable,
)
from trimaran.checkpoint.node_files import files_elsewhere, missing_files_error
from trimaran.checkpoint.shard_index import parse_index
from trimaran.checkpoint.tensor_regions import VALUE_BYTES, TensorIndex, TensorMeta, TensorRegion
from trimaran.core.regular_files import open_regular_fd


class StepFiles:
    """A checkpoint whose manifest and index are valid. The tensor files are verified by `verify` only.

    The tensor files are not parsed: the index says where each region is, and its offsets are checked against the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        self.index: TensorIndex = self._read_index()
        self._maps: dict[str, np.ndarray] = {}

    def bytes_of(self, meta: TensorMeta, region: TensorRegion) -> np.ndarray:
        """Return the bytes of a region, as a view of the mapped file: pages are read when they are accessed."""
        begin = region.offset
        return self._mapped(region.file)[begin : begin + region.num_values * VALUE_BYTES[meta.dtype]]

    def _read_index(self) -> TensorIndex:
        record = self.manifest.files[INDEX]
        try:
            text = read_limited(self.folder / INDEX, MAX_INDEX_BYTES)
        except (OSError, ValueError) as error:
            raise DamagedError(self.folder, [unreadable(INDEX, error)]) from None
        if len(text) != record.bytes or sha256(text).hexdigest() != record.sha256:
            raise DamagedError(self.folder, [Damage(INDEX, "does not match the manifest")])
        try:
            return parse_index(text, {name: each.bytes for name, each in self.manifest.files.items()})
        except ValueError as error:
            raise DamagedError(self.folder, [Damage(INDEX, f"is invalid: {error}")]) from None

    def _mapped(self, name: str) -> np.ndarray:
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
        return self._maps[name]
