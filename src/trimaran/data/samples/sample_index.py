"""The index of all samples of a run, numbered across sources, and the mixture of the sources."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import UserError, read_regular_text
from trimaran.data.feed import num_held_out, positions
from trimaran.data.sample_costs import SampleRecord
from trimaran.data.samples.source_part import SamplePart, not_samples
from trimaran.data.text.tokenizer import Tokenizer

FORMAT = "trimaran-mixture-1"
MIXTURE = "mixture.json"
MAX_REPEATS = 100  # of the samples of a mixture, on average, in one epoch


class MixtureEntry(BaseModel):
    """One source of a mixture. Its samples are in the folder `part` next to the mixture's folder."""

    model_config = ConfigDict(frozen=True)

    name: str
    part: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    weight: float | None = None
    epochs: float | None = None


class SourceMixture(BaseModel):
    """The content of `mixture.json`."""

    model_config = ConfigDict(frozen=True)

    format: Literal["trimaran-mixture-1"] = FORMAT
    sources: Annotated[tuple[MixtureEntry, ...], Field(min_length=1, max_length=127)]


class SampleIndex:
    """Random access to samples and images, numbered source by source: a `SampleTable`. Data is read on access."""

    def __init__(self, path: Path, mixture: SourceMixture, parts: Sequence[SamplePart]) -> None:
        self.path, self.mixture, self.parts = path, mixture, tuple(parts)
        self._first = [0, *accumulate(part.num_samples for part in parts)]
        self._images = [0, *accumulate(len(part.images) for part in parts)]
        self.num_samples, self.num_images = self._first[-1], self._images[-1]
        self.source_names = tuple(source.name for source in mixture.sources)
        self.vocab_size = max(part.meta.vocab_size for part in parts)  # one more than the largest id that can occur

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the index that `prepare_samples` wrote to `path`."""
        try:
            mixture = SourceMixture.model_validate_json(read_regular_text(path / MIXTURE, follow_links=True))
        except (OSError, UnicodeDecodeError, ValidationError):
            raise not_samples(path, MIXTURE) from None
        return cls(path, mixture, [SamplePart.open(path.parent / source.part) for source in mixture.sources])

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples; an image counts as one."""
        return sum(len(part.tokens) for part in self.parts)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.parts[0].tokenizer

    @cached_property
    def digest(self) -> str:
        """A hash of the samples and their mixture, 64 hexadecimal digits."""
        parts = [
            (source.name, source.weight, source.epochs, part.digest)
            for source, part in zip(self.mixture.sources, self.parts, strict=True)
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @cached_property
    def text_lengths(self) -> np.ndarray:
        """Tokens of each sample, an image counting as one, as int32 [num_samples]."""
        return _concatenated([np.diff(part.ends, prepend=0).astype(np.int32) for part in self.parts])

    @cached_property
    def image_counts(self) -> np.ndarray:
        """Number of images of each sample as int32 [num_samples]."""
        return _concatenated([np.diff(part.image_ends, prepend=0).astype(np.int32) for part in self.parts])

    @cached_property
    def first_image(self) -> np.ndarray:
        """The number of each sample's first image, then the total number of images, as int64 [num_samples + 1]."""
        ends = [part.image_ends + first for part, first in zip(self.parts, self._images, strict=False)]
        return np.concatenate([np.zeros(1, dtype=np.int64), *ends])

    @cached_property
    def image_sizes(self) -> np.ndarray:
        """Upright width and height of each image as int32 [num_images, 2]."""
        return _concatenated([part.sizes for part in self.parts])

    @cached_property
    def image_times(self) -> np.ndarray:
        """The time position of each image in its video as int32 [num_images]; -1: it begins one, or is none of one."""
        return _concatenated([part.times for part in self.parts])

    @cached_property
    def sources(self) -> np.ndarray:
        """The source number of each sample as int8 [num_samples]."""
        counts = [part.num_samples for part in self.parts]
        return np.repeat(np.arange(len(counts), dtype=np.int8), counts)

    @cached_property
    def bad(self) -> list[dict[str, str]]:
        """The bad samples, as {source, where, reason}."""
        named = zip(self.source_names, self.parts, strict=True)
        return [{"source": name} | entry for name, part in named for entry in part.bad]

    def sample(self, index: int) -> SampleRecord:
        assert 0 <= index < self.num_samples
        source = bisect_right(self._first, index) - 1
        part = self.parts[source]
        span = part.span(index - self._first[source])
        images = range(int(self.first_image[index]), int(self.first_image[index + 1]))
        return SampleRecord(part.tokens[span].astype(np.int64), part.targets[span], images, source)

    def image_bytes(self, number: int) -> bytes:
        """Return the bytes of an image file (JPEG, PNG, WebP and so on), undecoded."""
        assert 0 <= number < self._images[-1]
        source = bisect_right(self._images, number) - 1
        return self.parts[source].image_bytes(number - self._images[source])

    def origin(self, index: int) -> str:
        """Return where a sample came from, as `file:row`."""
        source = bisect_right(self._first, index) - 1
        return self.parts[source].origin(index - self._first[source])

    def mixed(self, seed: int, keep: np.ndarray | None = None) -> np.ndarray:
        """Return the sorted sample ids of an epoch, repeated by weights and epochs, which apply to those in `keep`."""
        ids = [np.arange(low, high) for low, high in zip(self._first, self._first[1:], strict=False)]
        ids = ids if keep is None else [each[keep[each]] for each in ids]
        sources = self.mixture.sources
        weights, epochs = [each.weight for each in sources], [each.epochs for each in sources]
        repeats = repeats_per_epoch([len(each) for each in ids], weights, epochs)
        return np.concatenate([repeat_ids(each, count, seed) for each, count in zip(ids, repeats, strict=True)])

    def holdout_mask(self, fraction: float, seed: int) -> np.ndarray:
        """Return a mask of the held-out samples: this fraction of each source, at least one sample of each."""
        mask = np.zeros(self.num_samples, dtype=bool)
        for first, part in zip(self._first, self.parts, strict=False):
            if count := num_held_out(part.num_samples, fraction):
                mask[first + positions(seed, np.arange(count), part.num_samples)] = True
        return mask

    def verify(self) -> None:
        """Raise unless all checksums match. Reads everything except image files outside the index."""
        for part in self.parts:
            part.verify()


def _concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the arrays as one; a single array stays memory-mapped."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def repeats_per_epoch(
    counts: Sequence[int], weights: Sequence[float | None], epochs: Sequence[float | None]
) -> list[Fraction]:
    """Return how often the samples of each source occur in one epoch of the mixture.

    Sources with a weight occur in that proportion. The epoch is long enough to contain each of them completely: the
    source with the most samples per weight occurs once. The others occur `epochs` times, or once.
    """
    ratios = (Fraction(n) / Fraction(w) for n, w in zip(counts, weights, strict=True) if w)
    per_weight = max(ratios, default=Fraction(0))
    repeats = []
    for count, weight, epoch in zip(counts, weights, epochs, strict=True):
        if weight is not None and count:
            repeats.append(Fraction(weight) * per_weight / count)
        else:
            repeats.append(Fraction(1 if epoch is None else epoch))
    total = sum(n * times for n, times in zip(counts, repeats, strict=True))
    if any(weights) and total > MAX_REPEATS * sum(counts):
        raise UserError("T038.weights-epoch-mixture", where="data.mixture", total=int(total), different=sum(counts))
    return repeats


def repeat_ids(ids: np.ndarray, times: Fraction, seed: int) -> np.ndarray:
    """Return the ids, each `times` times, sorted. The seed chooses the ids that get the fractional repeat."""
    full = int(times)
    extra = round((times - full) * len(ids))
    chosen = ids[positions(seed, np.arange(extra), len(ids))] if extra else ids[:0]
    return np.sort(np.concatenate([np.repeat(ids, full), chosen]))
