"""A synthetic training set of images and text with realistic lengths and sizes, for benchmarks and tests.

| kind | fraction of samples | text tokens, median (spread of the logarithm) | images | width, median |
|---|---|---|---|---|
| chat about an image | 35 % | 180 (0.8) | 1, or 2 in one of ten | 700 |
| caption | 25 % | 30 (0.5) | 1 | 500 |
| chat | 20 % | 350 (0.9) | none | |
| page of a document | 10 % | 500 (0.7) | 1, or 2 in three of ten | 1600, upright |
| text | 10 % | 1500 (1.0) | none | |

Widths have a log-normal spread of 0.45; the aspect ratio is log-normal around 1.2 (pages: 0.75) with a spread of 0.3.
"""

import io
from functools import cached_property

import numpy as np
from PIL import Image

from trimaran.data.samples.sample_index import SampleRecord
from trimaran.data.vision.image_grid import ALONE

IMAGE_TOKEN = 99
WORDS = 90  # ids below this are text


class Mix:
    """An in-memory index of `count` samples. Text is random; all images have the same content at different sizes.

    `scale` shrinks lengths and sizes for small models. `image_token` is the id of an image.
    """

    source_names = ("mix",)

    def __init__(self, count: int, *, seed: int = 0, scale: float = 1.0, image_token: int = IMAGE_TOKEN) -> None:
        draw = np.random.default_rng(seed)
        kind = draw.choice(5, count, p=[0.35, 0.25, 0.2, 0.1, 0.1])
        median, spread = np.array([180, 30, 350, 500, 1500]) * scale, np.array([0.8, 0.5, 0.9, 0.7, 1.0])
        self.text_lengths = np.exp(np.log(median[kind]) + spread[kind] * draw.standard_normal(count)).astype(int) + 4
        images = np.array([1, 1, 0, 1, 0])[kind] + (draw.random(count) < np.array([0.1, 0, 0, 0.3, 0])[kind])
        self.first_image = np.concatenate([[0], np.cumsum(images)])
        of = np.repeat(kind, images)
        widths = scale * np.array([700, 500, 0, 1600, 0])[of] * np.exp(0.45 * draw.standard_normal(len(of)))
        shapes = np.where(of == 3, 0.75, 1.2) * np.exp(0.3 * draw.standard_normal(len(of)))
        self.image_sizes = np.stack([widths, widths / shapes], axis=1).clip(8, 8000).astype(int)
        self.image_times = np.full(len(of), ALONE)
        self.num_samples, self.sources, self._image_token = count, np.zeros(count, dtype=np.int8), image_token
        self.digest = f"mix of {count} by {seed} at {scale}"

    def sample(self, index: int, /) -> SampleRecord:
        """Return a sample: images first, then text; all text tokens are targets."""
        first, last = self.first_image[index : index + 2].tolist()
        tokens = np.random.default_rng(index).integers(0, WORDS, self.text_lengths[index])
        tokens[: last - first] = self._image_token
        return SampleRecord(tokens, tokens != self._image_token, range(first, last), 0)

    def image_bytes(self, number: int, /) -> bytes:
        return self._image

    def origin(self, index: int, /) -> str:
        return f"mix:{index}"

    @cached_property
    def _image(self) -> bytes:
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "JPEG")
        return file.getvalue()
