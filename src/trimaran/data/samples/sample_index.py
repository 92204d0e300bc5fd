"""All samples of a run, numbered as if they came from one place, and how often each comes."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import UserError
from trimaran.data.samples.source_mixture import copies, held_out, repeat
from trimaran.data.samples.source_part import SamplePart, not_samples
from trimaran.data.tokenizer import Tokenizer

FORMAT = "trimaran-mixture-1"
MIXTURE = "mixture.json"


class Ingredient(BaseModel):
    """One source of a mixture: its prepared samples are in the folder `part` beside the mixture's own."""

    model_config = ConfigDict(frozen=True)

    name: str
    part: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    weight: float | None = None
    epochs: float | None = None


class SourceMixture(BaseModel):
    """The content of `mixture.json`."""

    model_config = ConfigDict(frozen=True)

    format: Literal["trimaran-mixture-1"] = FORMAT
    sources: Annotated[tuple[Ingredient, ...], Field(min_length=1, max_length=127)]


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One sample. An image is one token in it; `targets` says which tokens are to be predicted."""

    tokens: np.ndarray
    targets: np.ndarray
    images: range
    source: int


class SampleIndex:
    """Random access to the samples and images of one or several sources; nothing is read before it is asked for.

    Samples, and images, are numbered source by source in the order they were found in.
    """

    def __init__(self, path: Path, mixture: SourceMixture, parts: Sequence[SamplePart]) -> None:
        self.path, self.mixture, self.parts = path, mixture, tuple(parts)
        self._first = [0, *accumulate(part.num_samples for part in parts)]
        self._images = [0, *accumulate(len(part.images) for part in parts)]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return what `prepare_samples` made at `path`."""
        try:
            mixture = SourceMixture.model_validate_json((path / MIXTURE).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValidationError):
            raise not_samples(path, MIXTURE) from None
        return cls(path, mixture, [SamplePart.open(path.parent / source.part) for source in mixture.sources])

    @property
    def num_samples(self) -> int:
        return self._first[-1]

    @property
    def num_images(self) -> int:
        return self._images[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples; each image is one."""
        return sum(len(part.tokens) for part in self.parts)

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.mixture.sources)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that can occur."""
        return max(part.meta.vocab_size for part in self.parts)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.parts[0].tokenizer

    @cached_property
    def digest(self) -> str:
        """What tells these samples and their mixture from others, in 64 hexadecimal digits."""
        facts = [
            (source.name, source.weight, source.epochs, part.digest)
            for source, part in zip(self.mixture.sources, self.parts, strict=True)
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @cached_property
    def text_lengths(self) -> np.ndarray:
        """Tokens of each sample, an image being one, as int32 [num_samples]."""
        return _joined([np.diff(part.ends, prepend=0).astype(np.int32) for part in self.parts])

    @cached_property
    def image_counts(self) -> np.ndarray:
        """Images of each sample as int32 [num_samples]."""
        return _joined([np.diff(part.image_ends, prepend=0).astype(np.int32) for part in self.parts])

    @cached_property
    def first_image(self) -> np.ndarray:
        """The number of each sample's first image, and the number of images behind the last, as int64."""
        ends = [part.image_ends + first for part, first in zip(self.parts, self._images, strict=False)]
        return np.concatenate([np.zeros(1, dtype=np.int64), *ends])

    @cached_property
    def image_sizes(self) -> np.ndarray:
        """Width and height of each image as int32 [num_pictures, 2], turned as its camera meant it."""
        return _joined([part.sizes for part in self.parts])

    @cached_property
    def sources(self) -> np.ndarray:
        """The number of each sample's source as int8 [num_samples]."""
        counts = [part.num_samples for part in self.parts]
        return np.repeat(np.arange(len(counts), dtype=np.int8), counts)

    @cached_property
    def bad(self) -> list[dict[str, str]]:
        """What was left out, as {source, where, reason}."""
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
        """Return the file of an image as it was found: JPEG, PNG, WebP and so on."""
        assert 0 <= number < self.num_images
        source = bisect_right(self._images, number) - 1
        return self.parts[source].image_bytes(number - self._images[source])

    def origin(self, index: int) -> str:
        """Return where a person finds a sample: a file, and behind a colon the row in it."""
        source = bisect_right(self._first, index) - 1
        return self.parts[source].origin(index - self._first[source])

    def mixed(self, seed: int, keep: np.ndarray | None = None) -> np.ndarray:
        """Return the samples of one pass, each as often as weights and epochs say, as int64, sorted.

        With `keep`, a bool for each sample, the others do not come, and the shares are of those that do.
        """
        ids = [np.arange(low, high) for low, high in zip(self._first, self._first[1:], strict=False)]
        ids = ids if keep is None else [each[keep[each]] for each in ids]
        sources = self.mixture.sources
        times = copies(
            [len(each) for each in ids], [each.weight for each in sources], [each.epochs for each in sources]
        )
        return np.concatenate([repeat(each, time, seed) for each, time in zip(ids, times, strict=True)])

    def holdout_mask(self, share: float, seed: int) -> np.ndarray:
        """Return True for each sample that is kept for evaluation: that share of each source, at least one of it."""
        mask = np.zeros(self.num_samples, dtype=bool)
        for first, part in zip(self._first, self.parts, strict=False):
            mask[held_out(first, part.num_samples, share, seed)] = True
        return mask

    def refuse_unknown(self, vocabulary: int) -> None:
        """Raise when the tokens go beyond what a model with that vocabulary knows."""
        if self.vocab_size > vocabulary:
            raise UserError("T020", f"the data has {self.vocab_size:,} token ids, the model knows {vocabulary:,}",
                            where="data.tokenizer", fix=f"set model.shape.vocab to {self.vocab_size}, "
                            "or use the model's own tokenizer")  # fmt: skip

    def verify(self) -> None:
        """Raise unless every file is byte for byte what was written. Reads everything but images that stayed away."""
        for part in self.parts:
            part.verify()


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the arrays as one; a single one stays mapped to its file."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
