"""The arrays of one rank's step, written row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trimaran.core import ImageRules
from trimaran.data.feed import DataShare
from trimaran.data.quarantine import BadSampleError, check_token_ids
from trimaran.data.row_packing import Batching, slots_per_row
from trimaran.data.sample_costs import SampleRecord, SampleTable
from trimaran.data.text.token_shards import IGNORED
from trimaran.data.vision.image_grid import (
    ALONE,
    GREY,
    NEWLINE,
    TokenLayout,
    anyres_layout,
    fill_patches,
    grid_positions,
    grids_of,
)

Layouts = Sequence[TokenLayout]


@dataclass(frozen=True, slots=True)
class PackedSample:
    """One sample with its images expanded. `labels` are the next tokens, IGNORED where there is no target.

    `image_starts` are the positions of its images. `grids` has one array [parts, 2] per image: the rows and columns of
    patches of each part. `layouts` say how the tokens of each image follow from its patches, if not one by one. `times`
    are the images' time positions in their videos (see `SampleTable`); none if no image continues a video.
    """

    tokens: np.ndarray
    labels: np.ndarray
    image_starts: tuple[int, ...] = ()
    grids: tuple[np.ndarray, ...] = ()
    layouts: tuple[TokenLayout, ...] = ()
    times: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class SamplePacker:
    """Expands the images of samples and builds labels. `rules` says how images are tokenized; None: no images.

    Samples are truncated to `limit` tokens. Ids must be below `vocabulary`; None skips that check.
    """

    rules: ImageRules | None
    limit: int
    vocabulary: int | None = None

    def pack(self, sample: SampleRecord, sizes: np.ndarray, times: Sequence[int] = ()) -> PackedSample:
        """Return the sample with its images, of `sizes` [images, 2] (width, height), expanded.

        Raises BadSampleError if the image tokens do not match the images, or a token id is out of range.
        """
        tokens, targets = np.asarray(sample.tokens, dtype=np.int64), np.asarray(sample.targets, dtype=bool)
        if tokens.shape != targets.shape or tokens.ndim != 1:
            raise BadSampleError(f"its tokens have shape {tokens.shape}, its targets {targets.shape}")
        check_token_ids(tokens, self.vocabulary)
        is_image = np.zeros_like(targets) if self.rules is None else tokens == self.rules.image_token
        if self.rules is not None and np.count_nonzero(is_image) != len(sizes):
            raise BadSampleError(f"it has {len(sizes)} images and {np.count_nonzero(is_image)} image tokens")
        grids, image_tokens, layouts = self._grids(sizes)
        repeats = np.ones(len(tokens), dtype=np.int64)
        repeats[is_image] = image_tokens
        image_starts = (np.cumsum(repeats) - repeats)[is_image]
        tokens, targets = np.repeat(tokens, repeats), np.repeat(targets & ~is_image, repeats)
        labels = np.full_like(tokens, IGNORED)
        labels[:-1][targets[1:]] = tokens[1:][targets[1:]]
        tokens, labels = tokens[: self.limit], labels[: self.limit]
        return PackedSample(tokens, labels, tuple(image_starts.tolist()), grids, layouts, tuple(times))

    def blank(self, length: int, sizes: np.ndarray) -> PackedSample:
        """Return a stand-in for an unused sample: image tokens first, then zeros, and no targets."""
        grids, image_tokens, layouts = self._grids(sizes)
        tokens = np.zeros(min(length, self.limit), dtype=np.int64)
        if self.rules is not None:
            tokens[: image_tokens.sum()] = self.rules.image_token
        image_starts = np.cumsum(image_tokens) - image_tokens
        return PackedSample(tokens, np.full_like(tokens, IGNORED), tuple(image_starts.tolist()), grids, layouts)

    def _grids(self, sizes: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray, tuple[TokenLayout, ...]]:
        """Return the grids of the images, the number of tokens of each image, and the layouts that they have."""
        if self.rules is None:
            return (), np.zeros(0, dtype=np.int64), ()
        rules, pairs = self.rules, [(width, height) for width, height in sizes.tolist()]
        grids = tuple(grids_of(size, rules) for size in pairs)
        if rules.variant == "anyres":  # else each token is its own patch, or a merged group
            layouts = tuple(anyres_layout(size, rules) for size in pairs)
            return grids, np.array([len(each.sources) for each in layouts], dtype=np.int64), layouts
        patches = np.array([int(each.prod(1).sum()) for each in grids], dtype=np.int64)
        return grids, patches // rules.merge**2, ()


def token_positions(sample: PackedSample, rules: ImageRules, length: int) -> np.ndarray:
    """Return the position ids (time, row, column) [3, length] of a sample and the padding after it."""
    images, times = [], []
    alone = (ALONE,) * len(sample.grids)
    for first, parts, time in zip(sample.image_starts, sample.grids, sample.times or alone, strict=True):
        at = first
        for rows, columns in (parts // rules.merge).tolist():
            images.append((at, rows, columns))
            times.append(time)
            at += rows * columns
    return grid_positions(length, images, times)


class RowArrays:
    """Tokens, labels and documents of all rows of a rank's step; optionally sources and position ids."""

    def __init__(
        self, share: DataShare, seq_len: int, batching: Batching, *, sources: bool, rules: ImageRules | None
    ) -> None:
        self._share, self._seq_len, self._batching, self._rules = share, seq_len, batching, rules
        shape = (share.grad_accum, share.micro_batch, seq_len)
        self.tokens = np.zeros(shape, dtype=np.int64)
        self.labels = np.full(shape, IGNORED, dtype=np.int64)
        self.documents = np.zeros(shape, dtype=np.int32)
        self.sources = np.zeros(shape, dtype=np.int8) if sources else None
        has_grid = rules is not None and rules.positions == "grid"
        self.positions = np.zeros((shape[0], 3, *shape[1:]), dtype=np.int64) if has_grid else None

    def write_row(
        self, number: int, lengths: np.ndarray, samples: Sequence[PackedSample], sources: Sequence[int]
    ) -> None:
        """Write a row. Each sample is a document of its own; the padding at the end is one more document."""
        row = divmod(number, self._share.micro_batch)
        stops = np.cumsum(lengths).tolist()
        if self._batching == "bucket" and stops:  # slots of the same size; their padding is part of the documents
            slot = self._seq_len // int(slots_per_row(lengths.max(), self._seq_len))
            stops = [slot * count for count in range(1, len(stops) + 1)]
        starts, end = [0, *stops][:-1], stops[-1] if stops else 0
        for document, (start, stop, sample, source) in enumerate(zip(starts, stops, samples, sources, strict=True)):
            used = slice(start, start + len(sample))
            self.tokens[row][used], self.labels[row][used] = sample.tokens, sample.labels
            self.documents[row][start:stop] = document
            if self.sources is not None:
                self.sources[row][start:stop] = source
            if self.positions is not None:
                assert self._rules is not None
                self.positions[row[0], :, row[1], start:stop] = token_positions(sample, self._rules, stop - start)
        self.documents[row][end:] = len(stops)
        if self.positions is not None:
            self.positions[row[0], :, row[1], end:] = grid_positions(self._seq_len - end, ())

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by their input names."""
        always = {"tokens": self.tokens, "labels": self.labels, "documents": self.documents}
        optional = {"sources": self.sources, "positions": self.positions}
        return always | {name: each for name, each in optional.items() if each is not None}


class FeatureSource(Protocol):
    """Saved outputs of a frozen vision tower: `image(n)` returns [tokens, width] of `dtype`."""

    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> np.dtype: ...
    def image(self, number: int, /) -> np.ndarray: ...


class ImageArrays:
    """A preallocated array for the images of one step: `size` patches; with `features`, `size` image tokens."""

    def __init__(self, table: SampleTable, rules: ImageRules, size: int, features: FeatureSource | None) -> None:
        self._table, self._rules, self._features = table, rules, features
        if features is None:
            self._name, self._data = "patches", np.empty((size, 3 * rules.frames * rules.patch**2), dtype=np.uint8)
        else:
            self._name, self._data = "features", np.empty((size, features.width), dtype=features.dtype)
        self._filled = self._num_grids = self._num_tokens = 0
        self._grids: list[np.ndarray] = []
        self._offsets: list[tuple[int, int, int]] = []
        self._layouts: list[TokenLayout] = []

    def begin_micro_batch(self) -> None:
        self._offsets.append((self._filled, self._num_grids, self._num_tokens))

    def append(self, numbers: Sequence[int], grids: Sequence[np.ndarray], layouts: Layouts = ()) -> None:
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

    def append_blank(self, grids: Sequence[np.ndarray], layouts: Layouts) -> None:
        stop = self._filled + sum(map(self._count, grids))
        self._data[self._filled : stop] = GREY if self._features is None else 0
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

    def _commit(self, filled: int, grids: Sequence[np.ndarray], layouts: Layouts) -> None:
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
