"""Sample sizes and costs: tokens after each image is expanded, patches, and compute beyond the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trimaran.core import ImageRules, RowCost
from trimaran.data.vision.image_grid import measure_images


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One sample: tokens (an image is one token), a mask of targets over them, and the numbers of its images."""

    tokens: np.ndarray
    targets: np.ndarray
    images: range
    source: int


class SampleTable(Protocol):
    """The part of a sample index that packing and loading use; `samples.sample_index.SampleIndex` implements it.

    `text_lengths` [samples] count an image as one token. `first_image` [samples + 1] is where the images of each
    sample start in `image_sizes` [images, 2] (width, height). `image_times` [images] are time positions in a video that
    is one block, counted from its first image; that one, and every image by itself, has -1.
    """

    @property
    def num_samples(self) -> int: ...
    @property
    def text_lengths(self) -> np.ndarray: ...
    @property
    def image_sizes(self) -> np.ndarray: ...
    @property
    def image_times(self) -> np.ndarray: ...
    @property
    def first_image(self) -> np.ndarray: ...
    @property
    def sources(self) -> np.ndarray: ...
    @property
    def source_names(self) -> Sequence[str]: ...
    @property
    def digest(self) -> str: ...
    def sample(self, index: int, /) -> SampleRecord: ...
    def image_bytes(self, number: int, /) -> bytes: ...
    def origin(self, index: int, /) -> str: ...


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """Sizes per sample (`lengths`, `patches`, `patch_pairs`) and per image (`image_tokens`, `image_patches`).

    `lengths` count tokens after image expansion and before truncation. `patch_pairs` counts the pairs of patches that
    attend to each other.
    """

    lengths: np.ndarray
    patches: np.ndarray
    patch_pairs: np.ndarray
    image_tokens: np.ndarray
    image_patches: np.ndarray

    def extra_cost(self, cost: RowCost, seq_len: int) -> np.ndarray:
        """Return the cost of each sample beyond its tokens, f64 [samples], after truncation to `seq_len`."""
        # Every row has `seq_len` tokens, padded or not, so the cost per token is the same for all rows.
        tokens = np.minimum(self.lengths, seq_len).astype(np.float64)
        return cost.token_pair * tokens**2 + cost.patch * self.patches + cost.patch_pair * self.patch_pairs


def measure_samples(table: SampleTable, rules: ImageRules | None) -> SampleSizes:
    """Return the sizes of all samples. Without `rules` there must be no images."""
    lengths = np.asarray(table.text_lengths, dtype=np.int64)
    if rules is None or not len(table.image_sizes):
        no_images, zeros = np.zeros(0, dtype=np.int64), np.zeros(table.num_samples, dtype=np.int64)
        return SampleSizes(lengths, zeros, zeros, no_images, no_images)
    sizes = measure_images(table.image_sizes, rules)
    first = np.asarray(table.first_image)
    totals = (np.concatenate([[0], np.cumsum(each)]) for each in (sizes.tokens - 1, sizes.patches, sizes.patch_pairs))
    added, patches, pairs = (each[first[1:]] - each[first[:-1]] for each in totals)
    return SampleSizes(lengths + added, patches, pairs, sizes.tokens, sizes.patches)
