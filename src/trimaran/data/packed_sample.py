"""One sample as it lies in a row: its images written out as tokens, and what is to be predicted."""

from dataclasses import dataclass

import numpy as np

from trimaran.core import ImageRules
from trimaran.data.quarantine import BadSampleError
from trimaran.data.sample_costs import IndexedSample
from trimaran.data.sequences import IGNORED
from trimaran.data.vision.grid_positions import grid_positions
from trimaran.data.vision.image_grid import grids_of


@dataclass(frozen=True, slots=True)
class PackedSample:
    """`labels` are the next tokens, IGNORED where there is no target.

    `firsts` are where its images begin, and `grids` the rows and columns of patches of each one's parts [parts, 2].
    """

    tokens: np.ndarray
    labels: np.ndarray
    firsts: tuple[int, ...] = ()
    grids: tuple[np.ndarray, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Scribe:
    """Writes samples out. `rules` say how images are taken; None: there are none.

    No piece is longer than `limit` tokens. `vocabulary` is how many token ids the model knows; None checks nothing.
    """

    rules: ImageRules | None
    limit: int
    vocabulary: int | None = None

    def spell(self, sample: IndexedSample, sizes: np.ndarray) -> PackedSample:
        """Return the sample with its images, of `sizes` [images, 2] (width, height), written out.

        A sample whose text and images do not belong together, or that the model has no tokens for, is a bad one.
        """
        tokens, targets = np.asarray(sample.tokens, dtype=np.int64), np.asarray(sample.targets, dtype=bool)
        self._check(tokens, targets, len(sizes))
        grids, times = self._grids(sizes)
        seen = np.zeros_like(targets) if self.rules is None else tokens == self.rules.image_token
        each = np.ones(len(tokens), dtype=np.int64)
        each[seen] = times
        firsts = (np.cumsum(each) - each)[seen]
        tokens, targets = np.repeat(tokens, each), np.repeat(targets & ~seen, each)
        labels = np.full_like(tokens, IGNORED)
        labels[:-1][targets[1:]] = tokens[1:][targets[1:]]
        return PackedSample(tokens[: self.limit], labels[: self.limit], tuple(firsts.tolist()), grids)

    def blank(self, length: int, sizes: np.ndarray) -> PackedSample:
        """Return what keeps the place of a sample that is not used: its images, then nothing, and no target."""
        grids, times = self._grids(sizes)
        tokens = np.zeros(min(length, self.limit), dtype=np.int64)
        if self.rules is not None:
            tokens[: times.sum()] = self.rules.image_token
        return PackedSample(tokens, np.full_like(tokens, IGNORED), tuple((np.cumsum(times) - times).tolist()), grids)

    def _grids(self, sizes: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Return the grids of images, and how many tokens each is."""
        if self.rules is None:
            return (), np.zeros(0, dtype=np.int64)
        grids = tuple(grids_of((width, height), self.rules) for width, height in sizes.tolist())
        patches = np.array([int(each.prod(1).sum()) for each in grids], dtype=np.int64)
        return grids, patches // self.rules.merge**2

    def _check(self, tokens: np.ndarray, targets: np.ndarray, num_images: int) -> None:
        if tokens.shape != targets.shape or tokens.ndim != 1:
            raise BadSampleError(f"its tokens have shape {tokens.shape}, its targets {targets.shape}")
        if self.vocabulary is not None and tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            worst = tokens.min() if tokens.min() < 0 else tokens.max()
            raise BadSampleError(f"token id {worst} is not one of the model's {self.vocabulary}")
        if self.rules is not None:
            found = int(np.count_nonzero(tokens == self.rules.image_token))
            if found != num_images:
                raise BadSampleError(f"it has {num_images} images, and places for {found}")


def place_tokens(piece: PackedSample, rules: ImageRules, length: int) -> np.ndarray:
    """Return time, row and column [3, length] of a piece and the padding behind it."""
    images = []
    for first, parts in zip(piece.firsts, piece.grids, strict=True):
        at = first
        for rows, columns in (parts // rules.merge).tolist():
            images.append((at, rows, columns))
            at += rows * columns
    return grid_positions(length, images)
