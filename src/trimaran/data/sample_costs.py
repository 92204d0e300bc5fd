"""What samples cost: how long they are with their images written out, and what a rank pays for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trimaran.core import ImageRules, RowCost
from trimaran.data.vision.image_grid import measure_images


class IndexedSample(Protocol):
    """One sample: its tokens, an image being one of them, which of them are targets, and its images' numbers."""

    @property
    def tokens(self) -> np.ndarray: ...

    @property
    def targets(self) -> np.ndarray: ...

    @property
    def images(self) -> range: ...

    @property
    def source(self) -> int: ...


class SampleTable(Protocol):
    """An index of samples, as far as rows and batches need it; `samples.index.SampleIndex` is one.

    `text_lengths` [samples] count an image as one token; `first_picture` [samples + 1] says where the images of a
    sample begin among `image_sizes` [images, 2] (width, height).
    """

    @property
    def num_samples(self) -> int: ...

    @property
    def text_lengths(self) -> np.ndarray: ...

    @property
    def image_sizes(self) -> np.ndarray: ...

    @property
    def first_image(self) -> np.ndarray: ...

    @property
    def sources(self) -> np.ndarray: ...

    @property
    def source_names(self) -> Sequence[str]: ...

    @property
    def digest(self) -> str: ...

    def sample(self, index: int, /) -> IndexedSample: ...

    def image_bytes(self, number: int, /) -> bytes: ...

    def origin(self, index: int, /) -> str: ...


@dataclass(frozen=True, slots=True)
class Measures:
    """Of each sample: its tokens with the images written out, not cut, and its patches. Of each image: its tokens.

    `patch_pairs` are the pairs of patches that see each other.
    """

    lengths: np.ndarray
    patches: np.ndarray
    patch_pairs: np.ndarray
    image_tokens: np.ndarray
    image_patches: np.ndarray

    def excess(self, cost: RowCost, seq_len: int) -> np.ndarray:
        """Return what each sample costs beside its tokens, f64 [samples], when what is longer than `seq_len` is cut.

        A row is `seq_len` tokens, filled or not: those cost the same everywhere, and only this differs.
        """
        tokens = np.minimum(self.lengths, seq_len).astype(np.float64)
        return cost.token_pair * tokens**2 + cost.patch * self.patches + cost.patch_pair * self.patch_pairs


def measure(table: SampleTable, rules: ImageRules | None) -> Measures:
    """Return the measures of all samples. Without `rules` there must be no images."""
    lengths = np.asarray(table.text_lengths, dtype=np.int64)
    if rules is None or not len(table.image_sizes):
        none, nothing = np.zeros(0, dtype=np.int64), np.zeros(table.num_samples, dtype=np.int64)
        return Measures(lengths, nothing, nothing, none, none)
    sizes = measure_images(table.image_sizes, rules)
    first = np.asarray(table.first_image)
    return Measures(
        lengths + _sums(sizes.tokens - 1, first),
        _sums(sizes.patches, first),
        _sums(sizes.patch_pairs, first),
        sizes.tokens,
        sizes.patches,
    )


def _sums(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the sum of `values` between each two neighbours of `first`."""
    upto = np.concatenate([[0], np.cumsum(values)])
    return upto[first[1:]] - upto[first[:-1]]
