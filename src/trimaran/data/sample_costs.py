"""What samples cost: how long they are with their pictures written out, and what a rank pays for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trimaran.core import ImageRules, RowCost
from trimaran.data.vision.image_grid import measure_pictures


class IndexedSample(Protocol):
    """One sample: its tokens, a picture being one of them, which of them are targets, and its pictures' numbers."""

    @property
    def tokens(self) -> np.ndarray: ...

    @property
    def targets(self) -> np.ndarray: ...

    @property
    def pictures(self) -> range: ...

    @property
    def source(self) -> int: ...


class SampleTable(Protocol):
    """An index of samples, as far as rows and batches need it; `samples.index.SampleIndex` is one.

    `text_lengths` [samples] count a picture as one token; `first_picture` [samples + 1] says where the pictures of a
    sample begin among `picture_sizes` [pictures, 2] (width, height).
    """

    @property
    def num_samples(self) -> int: ...

    @property
    def text_lengths(self) -> np.ndarray: ...

    @property
    def picture_sizes(self) -> np.ndarray: ...

    @property
    def first_picture(self) -> np.ndarray: ...

    @property
    def sources(self) -> np.ndarray: ...

    @property
    def source_names(self) -> Sequence[str]: ...

    @property
    def digest(self) -> str: ...

    def sample(self, index: int, /) -> IndexedSample: ...

    def picture_bytes(self, number: int, /) -> bytes: ...

    def origin(self, index: int, /) -> str: ...


@dataclass(frozen=True, slots=True)
class Measures:
    """Of each sample: its tokens with the pictures written out, not cut, and its patches. Of each picture: its tokens.

    `patch_pairs` are the pairs of patches that see each other.
    """

    lengths: np.ndarray
    patches: np.ndarray
    patch_pairs: np.ndarray
    picture_tokens: np.ndarray
    picture_patches: np.ndarray

    def excess(self, cost: RowCost, seq_len: int) -> np.ndarray:
        """Return what each sample costs beside its tokens, f64 [samples], when what is longer than `seq_len` is cut.

        A row is `seq_len` tokens, filled or not: those cost the same everywhere, and only this differs.
        """
        tokens = np.minimum(self.lengths, seq_len).astype(np.float64)
        return cost.token_pair * tokens**2 + cost.patch * self.patches + cost.patch_pair * self.patch_pairs


def measure(table: SampleTable, rules: ImageRules | None) -> Measures:
    """Return the measures of all samples. Without `rules` there must be no pictures."""
    lengths = np.asarray(table.text_lengths, dtype=np.int64)
    if rules is None or not len(table.picture_sizes):
        none, nothing = np.zeros(0, dtype=np.int64), np.zeros(table.num_samples, dtype=np.int64)
        return Measures(lengths, nothing, nothing, none, none)
    sizes = measure_pictures(table.picture_sizes, rules)
    first = np.asarray(table.first_picture)
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
