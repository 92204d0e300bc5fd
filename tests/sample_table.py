"""An in-memory sample index for tests."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from benchmarks.mix import IMAGE_TOKEN
from PIL import Image

from trimaran.data import ALONE, SampleRecord


def png(colour: tuple[int, int, int], size: tuple[int, int]) -> bytes:
    """Return an image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


@dataclass
class Table:
    """`texts` are token ids, IMAGE_TOKEN for an image. The first third of each text has no targets.

    `images` are the image sizes in order. Image n has the colour (n, n, n) unless it is in `files`.
    """

    texts: Sequence[Sequence[int]]
    images: Sequence[tuple[int, int]] = ()
    sources: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int8))
    source_names: Sequence[str] = ("all",)
    files: Mapping[int, bytes] = field(default_factory=dict)
    digest: str = "by hand"

    def __post_init__(self) -> None:
        if not len(self.sources):
            self.sources = np.zeros(len(self.texts), dtype=np.int8)

    @property
    def num_samples(self) -> int:
        return len(self.texts)

    @cached_property
    def text_lengths(self) -> np.ndarray:
        return np.array([len(text) for text in self.texts], dtype=np.int32)

    @cached_property
    def image_sizes(self) -> np.ndarray:
        return np.array(self.images, dtype=np.int32).reshape(-1, 2)

    @cached_property
    def image_times(self) -> np.ndarray:
        return np.full(len(self.images), ALONE)

    @cached_property
    def first_image(self) -> np.ndarray:
        return np.cumsum([0, *(list(text).count(IMAGE_TOKEN) for text in self.texts)])

    def sample(self, index: int, /) -> SampleRecord:
        tokens = np.array(self.texts[index], dtype=np.int64)
        targets = np.arange(len(tokens)) >= len(tokens) // 3
        first, last = self.first_image[index : index + 2].tolist()
        return SampleRecord(tokens, targets, range(first, last), int(self.sources[index]))

    def image_bytes(self, number: int, /) -> bytes:
        if number in self.files:
            return self.files[number]
        return png((number, number, number), self.images[number])

    def origin(self, index: int, /) -> str:
        return f"texts:{index}"
