"""The bytes of a checkpoint on disk, mapped into memory. No torch in here."""

import mmap
import os
from hashlib import sha256
from pathlib import Path

import numpy as np

from trimaran.checkpoint.durable import OLD
from trimaran.checkpoint.manifest import INDEX, MAX_INDEX_BYTES, Damage, DamagedError, read_limited, read_manifest
from trimaran.checkpoint.shard_index import parse_index
from trimaran.checkpoint.tensor_regions import VALUE_BYTES, Index, TensorRegion, Whole


class StepFiles:
    """A checkpoint whose manifest and index are sound. What the tensors' files hold is `verify`'s to say.

    Nothing in a file is interpreted: the index says where each part is, and every place was checked against its file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        self.index: Index = self._read_index()
        self._maps: dict[str, np.ndarray] = {}

    def bytes_of(self, whole: Whole, part: TensorRegion) -> np.ndarray:
        """Return the bytes of a part. They are the file's own: nothing is read before it is looked at."""
        begin = part.offset
        return self._mapped(part.file)[begin : begin + part.num_values * VALUE_BYTES[whole.dtype]]

    def _read_index(self) -> Index:
        record = self.manifest.files[INDEX]
        try:
            text = read_limited(self.folder / INDEX, MAX_INDEX_BYTES)
        except (OSError, ValueError) as error:
            raise DamagedError(self.folder, [Damage(INDEX, f"cannot be read: {error}")]) from None
        if len(text) != record.bytes or sha256(text).hexdigest() != record.sha256:
            raise DamagedError(self.folder, [Damage(INDEX, "is not what the manifest says")])
        try:
            return parse_index(text, {name: each.bytes for name, each in self.manifest.files.items()})
        except ValueError as error:
            raise DamagedError(self.folder, [Damage(INDEX, f"makes no sense: {error}")]) from None

    def _mapped(self, name: str) -> np.ndarray:
        if name not in self._maps:
            try:
                fd = os.open(self.folder / name, OLD)
            except OSError as error:
                raise DamagedError(self.folder, [Damage(name, f"cannot be read: {error.strerror}")]) from None
            try:
                size = os.fstat(fd).st_size
                if size != self.manifest.files[name].bytes:
                    raise DamagedError(self.folder, [Damage(name, f"has {size:,} bytes")])
                # A private copy on write: torch wants memory that could be written to, and the file stays as it is.
                self._maps[name] = np.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_COPY), np.uint8)
            finally:
                os.close(fd)
        return self._maps[name]
