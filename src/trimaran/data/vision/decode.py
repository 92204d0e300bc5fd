"""From the bytes of an image to pixels of the wanted size. `docs/decisions/0015-decoding-images.md` says why so."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

MAX_PIXELS = 89_478_485  # a third of a gigabyte as RGB; Pillow's own limit, from which it warns
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")  # none that starts another program
FINER = 1.5  # a JPEG may be decoded at a part of its size that is still so much larger than what is wanted
GAP = 3.0  # a first coarse step of a large reduction leaves so much for the exact one
ORIENTATION = 0x0112  # EXIF's tag
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = 5  # from this orientation on, width and height change places


class BadImageError(Exception):
    """The bytes are no image that can be used; the message says why."""


def upright_size(data: bytes) -> tuple[int, int]:
    """Return width and height as the image is meant to be seen. Its head is enough, unless it is a WebP or AVIF."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = _checked(image).size
            return (height, width) if _orientation(image) >= SIDEWAYS else (width, height)
    except BadImageError:
        raise
    except Exception as error:  # what a broken file may raise is not written down anywhere
        raise BadImageError(_reason(error)) from error


def pixels_of(data: bytes, sizes: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Return the image, upright, as u8 [height, width, 3] in each of `sizes` (width, height). Decodes once."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            orientation = _orientation(_checked(image))
            lying = [size[::-1] if orientation >= SIDEWAYS else size for size in sizes]
            largest = max(width for width, _ in lying), max(height for _, height in lying)
            image.draft(None, (round(largest[0] * FINER), round(largest[1] * FINER)))
            colours = _rgb(image)
            return [np.asarray(_turned(_resized(colours, size), orientation)) for size in lying]
    except BadImageError:
        raise
    except Exception as error:  # what a broken file may raise is not written down anywhere
        raise BadImageError(_reason(error)) from error


def _checked(image: Image.Image) -> Image.Image:
    if image.width * image.height > MAX_PIXELS:
        raise BadImageError(f"it has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
    return image


def _orientation(image: Image.Image) -> int:
    """Return EXIF's orientation, 1 where there is none or none that makes sense."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # Pillow would decode the whole image to look for the field behind its pixels
    if image.format == "TIFF":
        return 1  # Pillow turns it by itself when it is decoded, and says its size as if it had
    found = image.getexif().get(ORIENTATION, 1)
    return found if found in TURNS else 1


def _rgb(image: Image.Image) -> Image.Image:
    """Return the image in three colours of 8 bits. What is transparent becomes white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return _from_deep(image)
    if image.has_transparency_data:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, "white")
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def _from_deep(image: Image.Image) -> Image.Image:
    """Return a grey image of more than 8 bits with its upper 8. Numbers that no 16 bits hold have no colour."""
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 0xFFFF:
        raise BadImageError(f"its pixels are of kind {image.mode}, which has no colours")
    return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC, reducing_gap=GAP)


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(TURNS[orientation]) if orientation in TURNS else image


def _reason(error: Exception) -> str:
    return f"the image cannot be read: {type(error).__name__}: {error}"[:200]
