"""Images of a prompt, read and placed as the training data does it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimaran.core import ImageRules, UserError
from trimaran.core.regular_files import read_regular_bytes
from trimaran.data.samples.parse_chat import MARKER
from trimaran.data.text.packed_sample import SamplePacker
from trimaran.data.vision.decode import BadImageError, upright_size
from trimaran.data.vision.patches import fill_patches
from trimaran.train.generation.next_token import PlacedImage


@dataclass(frozen=True, slots=True)
class PromptImage:
    """The patches of one image, u8 [P, values], and its width and height."""

    patches: np.ndarray
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class UnplacedTokens:
    """A sample without targets in which an image is one token."""

    tokens: np.ndarray
    images: range = range(0)
    source: int = 0

    @property
    def targets(self) -> np.ndarray:
        return np.zeros(len(self.tokens), dtype=bool)


def read_image(file: Path, rules: ImageRules) -> PromptImage:
    """Return the patches of an image file."""
    try:
        return decode_image(read_regular_bytes(file, follow_links=True), rules)
    except OSError as error:
        raise UserError("A030", f"the image cannot be read: {error.strerror}", where=f"--image {file}",
                        fix="check the name and the permissions of the file") from None  # fmt: skip
    except BadImageError as error:
        raise UserError("A030", f"this is not an image that can be used: {error}", where=f"--image {file}",
                        fix="name a JPEG, PNG, WebP, GIF, BMP, TIFF, PPM or AVIF file") from None  # fmt: skip


def decode_image(data: bytes, rules: ImageRules) -> PromptImage:
    """Return the patches of an encoded image. Raises BadImageError if it is none."""
    size = upright_size(data)
    packer = SamplePacker(rules, limit=1 << 30)
    grids = packer.blank(0, np.array([size])).grids[0]
    patches = np.empty((int(grids.prod(1).sum()), 3 * rules.patch**2), dtype=np.uint8)
    fill_patches(data, size, rules, patches)
    return PromptImage(patches, size)


def parts_with_images(text: str, num_images: int) -> list[str | None]:
    """Return a text as parts; None is an image. `<image>` in the text is one; without it images come first."""
    if not num_images or MARKER not in text:
        return [*[None] * num_images, text]
    texts = text.split(MARKER)
    if len(texts) - 1 != num_images:
        raise UserError("A001", f"the text has {len(texts) - 1} times {MARKER}, and there are {num_images} images",
                        where="--image", fix=f"write {MARKER} once for each image, or not at all")  # fmt: skip
    return [part for each in texts for part in (each, None)][:-1]


def place_images(
    ids: np.ndarray, images: Sequence[PromptImage], rules: ImageRules | None
) -> tuple[list[int], list[PlacedImage]]:
    """Return `ids`, in which an image is one token, with all tokens of each image, and where the images are."""
    if rules is None or not images:
        return ids.tolist(), []
    sizes = np.array([each.size for each in images], dtype=np.int64).reshape(-1, 2)
    sample = SamplePacker(rules, limit=1 << 30).pack(UnplacedTokens(ids), sizes)
    if sample.layouts:
        raise UserError("M077", "generation does not arrange the tiles of LLaVA-OneVision yet", where="--image",
                        fix="write the model with `trimaran export`, and use transformers")  # fmt: skip
    placed = [
        PlacedImage(image.patches, grids, first, rules.merge)
        for image, grids, first in zip(images, sample.grids, sample.image_starts, strict=True)
    ]
    return sample.tokens.tolist(), placed
