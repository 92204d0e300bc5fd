"""The images of one rank's step, concatenated: as patches, or as features of a frozen vision tower."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from trimaran.core import ImageRules
from trimaran.data.sample_costs import SampleTable
from trimaran.data.vision.anyres import NEWLINE, TokenLayout
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
            self._name, self._data = "patches", np.empty((size, 3 * rules.frames * rules.patch**2), dtype=np.uint8)
        else:
            self._name, self._data = "features", np.empty((size, features.width), dtype=features.dtype)
        self._filled = self._num_grids = 0
        self._grids: list[np.ndarray] = []
        self._offsets: list[tuple[int, int, int]] = []
        self._num_tokens = 0
        self._layouts: list[TokenLayout] = []

    def begin_micro_batch(self) -> None:
        self._offsets.append((self._filled, self._num_grids, self._num_tokens))

    def append(self, numbers: Sequence[int], grids: Sequence[np.ndarray], layouts: Sequence[TokenLayout] = ()) -> None:
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
        self._commit(at, grids, layouts)

    def append_blank(self, grids: Sequence[np.ndarray], layouts: Sequence[TokenLayout] = ()) -> None:
        """Append blank images."""
        stop = self._filled + sum(map(self._count, grids))
        if self._features is None:
            grey_patches(self._data[self._filled : stop])
        else:
            self._data[self._filled : stop] = 0
        self._commit(stop, grids, layouts)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by their input names. The preallocated array must be full."""
        assert self._filled == len(self._data)
        empty = np.zeros((0, 2), dtype=np.int32)
        arrays = {self._name: self._data, "grids": np.concatenate([empty, *self._grids])}
        if self._rules.variant == "anyres":
            sources = [np.zeros((0, 4), dtype=np.int32), *(each.sources for each in self._layouts)]
            weights = [np.zeros((0, 4), dtype=np.float32), *(each.weights for each in self._layouts)]
            arrays |= {"token_sources": np.concatenate(sources), "token_weights": np.concatenate(weights)}
        return arrays

    def offsets(self) -> dict[str, tuple[int, ...]]:
        """Return where each micro-batch starts in each array, and where the last one ends."""
        last = (self._filled, self._num_grids, self._num_tokens)
        data, grids, tokens = zip(*self._offsets, last, strict=True)
        laid_out = {"token_sources": tokens, "token_weights": tokens} if self._rules.variant == "anyres" else {}
        return {self._name: data, "grids": grids, **laid_out}

    def _commit(self, filled: int, grids: Sequence[np.ndarray], layouts: Sequence[TokenLayout]) -> None:
        at = self._filled - self._offsets[-1][0] if layouts else 0  # patches of the micro-batch before these images
        for grid, layout in zip(grids, layouts, strict=False):
            moved = np.where(layout.sources == NEWLINE, NEWLINE, layout.sources + at).astype(np.int32)
            self._layouts.append(TokenLayout(moved, layout.weights))
            self._num_tokens += len(moved)
            at += self._count(grid)
        self._filled = filled
        self._num_grids += sum(map(len, grids))
        self._grids += grids

    def _count(self, grid: np.ndarray) -> int:
        patches = int(grid.prod(1).sum())
        return patches if self._features is None else patches // self._rules.merge**2
