"""One sample of a row: tokens with each image expanded, labels, and image grids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.core import ImageRules
from trimaran.data.quarantine import BadSampleError
from trimaran.data.sample_costs import IndexedSample
from trimaran.data.text.token_shards import IGNORED
from trimaran.data.vision.anyres import TokenLayout
from trimaran.data.vision.grid_positions import ALONE, grid_positions
from trimaran.data.vision.image_grid import grids_of, layout_of


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

    def pack(self, sample: IndexedSample, sizes: np.ndarray, times: Sequence[int] = ()) -> PackedSample:
        """Return the sample with its images, of `sizes` [images, 2] (width, height), expanded.

        Raises BadSampleError if the image tokens do not match the images, or a token id is out of range.
        """
        tokens, targets = np.asarray(sample.tokens, dtype=np.int64), np.asarray(sample.targets, dtype=bool)
        self._check(tokens, targets, len(sizes))
        grids, image_tokens, layouts = self._grids(sizes)
        is_image = np.zeros_like(targets) if self.rules is None else tokens == self.rules.image_token
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
        grids = tuple(grids_of((width, height), self.rules) for width, height in sizes.tolist())
        laid_out = (layout_of((width, height), self.rules) for width, height in sizes.tolist())
        if layouts := tuple(each for each in laid_out if each is not None):
            return grids, np.array([len(each.sources) for each in layouts], dtype=np.int64), layouts
        patches = np.array([int(each.prod(1).sum()) for each in grids], dtype=np.int64)
        return grids, patches // self.rules.merge**2, ()

    def _check(self, tokens: np.ndarray, targets: np.ndarray, num_images: int) -> None:
        if tokens.shape != targets.shape or tokens.ndim != 1:
            raise BadSampleError(f"its tokens have shape {tokens.shape}, its targets {targets.shape}")
        if self.vocabulary is not None and tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            worst = tokens.min() if tokens.min() < 0 else tokens.max()
            raise BadSampleError(f"token id {worst} is not one of the model's {self.vocabulary}")
        if self.rules is not None:
            num_slots = int(np.count_nonzero(tokens == self.rules.image_token))
            if num_slots != num_images:
                raise BadSampleError(f"it has {num_images} images and {num_slots} image tokens")


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
