"""Memory shared by two processes, as large as the largest batch that went through it.

It is an anonymous memfd, not a file in /dev/shm: no other process can open it, the kernel frees it with its last user,
and the /dev/shm limit of containers (often 64 MB) does not apply.
"""

import mmap
import os
from collections.abc import Mapping, Sequence

import numpy as np

ALIGNMENT = 64
GROWTH = 1.25

ArrayLocation = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and offset of an array."""


class SharedSlot:
    """Memory for the arrays of one batch. One process fills it and the other reads it; they synchronize elsewhere."""

    def __init__(self) -> None:
        self._file = os.memfd_create("trimaran-loader")
        self._map: mmap.mmap | None = None
        self.num_bytes = 0

    def fill(self, arrays: Mapping[str, np.ndarray]) -> list[ArrayLocation]:
        """Copy the arrays into the slot and return where they are. The slot grows if needed."""
        locations, end = [], 0
        for name, array in arrays.items():
            locations.append((name, array.dtype.str, array.shape, end))
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if end > self.num_bytes:
            wanted = int(end * GROWTH)
            # Raises if memory is short; touching unallocated pages would kill the process instead.
            os.posix_fallocate(self._file, 0, wanted)
            self._map_all(wanted)
        for (_, _, _, offset), array in zip(locations, arrays.values(), strict=True):
            np.copyto(self._view(array.dtype.str, array.shape, offset), array)
        return locations

    def arrays(self, locations: Sequence[Sequence], num_bytes: int) -> dict[str, np.ndarray]:
        """Return views of the arrays at `locations`. `num_bytes` is the current size of the slot."""
        if num_bytes != self.num_bytes:
            self._map_all(num_bytes)
        return {name: self._view(dtype, tuple(shape), offset) for name, dtype, shape, offset in locations}

    def _view(self, dtype: str, shape: tuple[int, ...], offset: int) -> np.ndarray:
        if 0 in shape:
            return np.empty(shape, dtype=dtype)  # a view needs at least one byte
        assert self._map is not None
        return np.ndarray(shape, dtype=dtype, buffer=self._map, offset=offset)

    def _map_all(self, num_bytes: int) -> None:
        self._map, self.num_bytes = mmap.mmap(self._file, num_bytes), num_bytes

    def close(self) -> None:
        """Release the memory. It is freed once no array refers to it."""
        self._map, self.num_bytes = None, 0
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
