"""The images of one rank's step, one behind the other: as patches, or as what a frozen tower made of them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from trimaran.core import ImageRules
from trimaran.data.sample_costs import SampleTable
from trimaran.data.vision.patches import fill_patches, grey_patches


class Features(Protocol):
    """What a frozen tower made of images, kept: of image n, [tokens, width] of `dtype`."""

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> np.dtype: ...

    def image(self, number: int, /) -> np.ndarray: ...


class ImageSheet:
    """Room for the images of a step. Those of a sample are put there together, or not at all.

    `size` is how many patches there will be, or, with `features`, how many tokens of images.
    """

    def __init__(self, table: SampleTable, rules: ImageRules, size: int, features: Features | None) -> None:
        self._table, self._rules, self._features = table, rules, features
        if features is None:
            self._name, self._units = "patches", np.empty((size, 3 * rules.patch**2), dtype=np.uint8)
        else:
            self._name, self._units = "features", np.empty((size, features.width), dtype=features.dtype)
        self._filled = self._num_grids = 0
        self._grids: list[np.ndarray] = []
        self._cuts: list[tuple[int, int]] = []

    def begin_micro_batch(self) -> None:
        self._cuts.append((self._filled, self._num_grids))

    def put(self, numbers: Sequence[int], grids: Sequence[np.ndarray]) -> None:
        """Read images and put them behind the others. When one of them fails there is none."""
        at = self._filled
        for number, grid in zip(numbers, grids, strict=True):
            stop = at + self._count(grid)
            if self._features is None:
                width, height = self._table.image_sizes[number].tolist()
                fill_patches(self._table.image_bytes(number), (width, height), self._rules, self._units[at:stop])
            else:
                self._units[at:stop] = self._features.image(number)
            at = stop
        self._keep(at, grids)

    def leave_empty(self, grids: Sequence[np.ndarray]) -> None:
        """Put images on which there is nothing to see behind the others."""
        stop = self._filled + sum(map(self._count, grids))
        if self._features is None:
            grey_patches(self._units[self._filled : stop])
        else:
            self._units[self._filled : stop] = 0
        self._keep(stop, grids)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by the names that networks know. All rooms must have been filled."""
        assert self._filled == len(self._units)
        none = np.zeros((0, 2), dtype=np.int32)
        return {self._name: self._units, "grids": np.concatenate([none, *self._grids])}

    def cuts(self) -> dict[str, tuple[int, ...]]:
        """Return where each micro-batch begins in each array, and where the last ends."""
        units, grids = zip(*self._cuts, (self._filled, self._num_grids), strict=True)
        return {self._name: units, "grids": grids}

    def _keep(self, filled: int, grids: Sequence[np.ndarray]) -> None:
        self._filled = filled
        self._num_grids += sum(map(len, grids))
        self._grids += grids

    def _count(self, grid: np.ndarray) -> int:
        patches = int(grid.prod(1).sum())
        return patches if self._features is None else patches // self._rules.merge**2
