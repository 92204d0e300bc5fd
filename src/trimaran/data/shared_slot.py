"""A piece of memory that two processes see, as large as the largest batch that went through it.

It is an anonymous file of the kernel's, not one in /dev/shm: nobody else can see or forget it, it ends with its last
user, and the size that containers give /dev/shm (often 64 MB) does not limit it.
"""

import mmap
import os
from collections.abc import Mapping, Sequence

import numpy as np

ALIGNMENT = 64
GROWTH = 1.25

Place = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and offset of an array."""


class SharedSlot:
    """Memory for the arrays of one batch. One process fills it, the other reads it; who may when is theirs to agree."""

    def __init__(self) -> None:
        self._file = os.memfd_create("trimaran-loader")
        self._map: mmap.mmap | None = None
        self.num_bytes = 0

    def fill(self, arrays: Mapping[str, np.ndarray]) -> list[Place]:
        """Copy the arrays into it, one behind the other, and return where they lie. It grows as it must."""
        places, end = [], 0
        for name, array in arrays.items():
            places.append((name, array.dtype.str, array.shape, end))
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if end > self.num_bytes:
            wanted = int(end * GROWTH)
            os.posix_fallocate(self._file, 0, wanted)  # raises when there is no memory; touching it would kill
            self._map_all(wanted)
        for (_, _, _, offset), array in zip(places, arrays.values(), strict=True):
            np.copyto(self._view(array.dtype.str, array.shape, offset), array)
        return places

    def arrays(self, places: Sequence[Sequence], num_bytes: int) -> dict[str, np.ndarray]:
        """Return the arrays that lie at `places` of a slot that is `num_bytes` large, without a copy."""
        if num_bytes != self.num_bytes:
            self._map_all(num_bytes)
        return {name: self._view(dtype, tuple(shape), offset) for name, dtype, shape, offset in places}

    def _view(self, dtype: str, shape: tuple[int, ...], offset: int) -> np.ndarray:
        if 0 in shape:
            return np.empty(shape, dtype=dtype)  # there is no memory to look at
        assert self._map is not None
        return np.ndarray(shape, dtype=dtype, buffer=self._map, offset=offset)

    def _map_all(self, num_bytes: int) -> None:
        self._map, self.num_bytes = mmap.mmap(self._file, num_bytes), num_bytes

    def close(self) -> None:
        """Let go of the memory. Arrays that are still looked at keep it until they are gone."""
        self._map, self.num_bytes = None, 0
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
