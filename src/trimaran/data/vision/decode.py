"""Decodes image files to pixels of a given size. See `docs/decisions/0015-image-decoding.md` for the choices."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from trimaran.data.vision.joined_frames import split_frames

MAX_PIXELS = 89_478_485  # about 270 MB as RGB; above this Pillow warns
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")  # none of them starts another program
DRAFT_FACTOR = 1.5  # a JPEG may be decoded at a reduced size that is at least this much larger than the target
REDUCING_GAP = 3.0  # Pillow's `reducing_gap`: a large reduction starts with a fast coarse step
ORIENTATION_TAG = 0x0112  # of EXIF
TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
FIRST_SWAPPED_ORIENTATION = 5  # from this orientation on, width and height are swapped


class BadImageError(Exception):
    """The bytes are not a usable image; the message says why."""


def upright_size(data: bytes) -> tuple[int, int]:
    """Return width and height after EXIF rotation. The first bytes are enough, except for WebP and AVIF.

    Frames that were joined have the size of the first.
    """
    try:
        with Image.open(io.BytesIO(split_frames(data)[0]), formats=FORMATS) as image:
            width, height = _checked(image).size
            return (height, width) if _orientation(image) >= FIRST_SWAPPED_ORIENTATION else (width, height)
    except BadImageError:
        raise
    except Exception as error:  # Pillow does not document what a broken file raises
        raise BadImageError(_reason(error)) from error


def pixels_of(data: bytes, sizes: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Return the upright image as u8 [height, width, 3] in each of `sizes` (width, height). Decodes it once."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            orientation = _orientation(_checked(image))
            stored = [size[::-1] if orientation >= FIRST_SWAPPED_ORIENTATION else size for size in sizes]
            largest = max(width for width, _ in stored), max(height for _, height in stored)
            image.draft(None, (round(largest[0] * DRAFT_FACTOR), round(largest[1] * DRAFT_FACTOR)))
            rgb = _rgb(image)
            return [np.asarray(_upright(_resized(rgb, size), orientation)) for size in stored]
    except BadImageError:
        raise
    except Exception as error:  # Pillow does not document what a broken file raises
        raise BadImageError(_reason(error)) from error


def _checked(image: Image.Image) -> Image.Image:
    if image.width * image.height > MAX_PIXELS:
        raise BadImageError(f"it has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
    return image


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 1 if it is missing or invalid."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # Pillow would decode the full image to find a field after its pixels
    if image.format == "TIFF":
        return 1  # Pillow rotates a TIFF when it decodes it, and reports the rotated size
    orientation = image.getexif().get(ORIENTATION_TAG, 1)
    return orientation if orientation in TRANSPOSES else 1


def _rgb(image: Image.Image) -> Image.Image:
    """Return the image as 8-bit RGB. Transparent pixels become white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return _rgb_from_16_bit(image)
    if image.has_transparency_data:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, "white")
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def _rgb_from_16_bit(image: Image.Image) -> Image.Image:
    """Return the upper 8 bits of a 16-bit grey image. Raises if a value does not fit in 16 bits."""
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 0xFFFF:
        raise BadImageError(f"its pixel mode {image.mode} cannot be converted to RGB")
    return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC, reducing_gap=REDUCING_GAP)


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(TRANSPOSES[orientation]) if orientation in TRANSPOSES else image


def _reason(error: Exception) -> str:
    return f"the image cannot be read: {type(error).__name__}: {error}"[:200]
