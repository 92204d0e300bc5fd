"""The images of one rank's step, concatenated: as patches, or as features of a frozen vision tower."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from trimaran.core import ImageRules
from trimaran.data.sample_costs import SampleTable
from trimaran.data.vision.patches import fill_patches, grey_patches


class FeatureSource(Protocol):
    """Saved outputs of a frozen vision tower: `image(n)` returns [tokens, width] of `dtype`."""

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> np.dtype: ...

    def image(self, number: int, /) -> np.ndarray: ...


class ImageArrays:
    """A preallocated array for the images of one step. The images of a sample are appended together or not at all.

    `size` is the number of patches of the step; with `features`, the number of image tokens.
    """

    def __init__(self, table: SampleTable, rules: ImageRules, size: int, features: FeatureSource | None) -> None:
        self._table, self._rules, self._features = table, rules, features
        if features is None:
            self._name, self._data = "patches", np.empty((size, 3 * rules.patch**2), dtype=np.uint8)
        else:
            self._name, self._data = "features", np.empty((size, features.width), dtype=features.dtype)
        self._filled = self._num_grids = 0
        self._grids: list[np.ndarray] = []
        self._offsets: list[tuple[int, int]] = []

    def begin_micro_batch(self) -> None:
        self._offsets.append((self._filled, self._num_grids))

    def append(self, numbers: Sequence[int], grids: Sequence[np.ndarray]) -> None:
        """Read and append images. If one of them fails, none is appended."""
        at = self._filled
        for number, grid in zip(numbers, grids, strict=True):
            stop = at + self._count(grid)
            if self._features is None:
                width, height = self._table.image_sizes[number].tolist()
                fill_patches(self._table.image_bytes(number), (width, height), self._rules, self._data[at:stop])
            else:
                self._data[at:stop] = self._features.image(number)
            at = stop
        self._commit(at, grids)

    def append_blank(self, grids: Sequence[np.ndarray]) -> None:
        """Append blank images."""
        stop = self._filled + sum(map(self._count, grids))
        if self._features is None:
            grey_patches(self._data[self._filled : stop])
        else:
            self._data[self._filled : stop] = 0
        self._commit(stop, grids)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by their input names. The preallocated array must be full."""
        assert self._filled == len(self._data)
        empty = np.zeros((0, 2), dtype=np.int32)
        return {self._name: self._data, "grids": np.concatenate([empty, *self._grids])}

    def offsets(self) -> dict[str, tuple[int, ...]]:
        """Return where each micro-batch starts in each array, and where the last one ends."""
        data, grids = zip(*self._offsets, (self._filled, self._num_grids), strict=True)
        return {self._name: data, "grids": grids}

    def _commit(self, filled: int, grids: Sequence[np.ndarray]) -> None:
        self._filled = filled
        self._num_grids += sum(map(len, grids))
        self._grids += grids

    def _count(self, grid: np.ndarray) -> int:
        patches = int(grid.prod(1).sum())
        return patches if self._features is None else patches // self._rules.merge**2
