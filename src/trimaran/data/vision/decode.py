"""Decodes image files to pixels of a given size. See `docs/decisions/0015-image-decoding.md` for the choices."""

import io
import struct
from collections.abc import Sequence

import numpy as np
from PIL import Image

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
MAGIC = b"trimaran-frames-1\n"
COUNT, LENGTH = struct.Struct("<I"), struct.Struct("<Q")
MAX_TOGETHER = 16


class BadImageError(Exception):
    """The bytes are not a usable image; the message says why."""


def upright_size(data: bytes) -> tuple[int, int]:
    """Return width and height after EXIF rotation, of the first of joined frames. WebP and AVIF need all bytes."""
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
            found = []
            for size in stored:
                resized = rgb
                if rgb.size != size:
                    resized = rgb.resize(size, Image.Resampling.BICUBIC, reducing_gap=REDUCING_GAP)
                turned = resized.transpose(TRANSPOSES[orientation]) if orientation in TRANSPOSES else resized
                found.append(np.asarray(turned))
            return found
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
        values = np.asarray(image)
        if image.mode == "F" or values.min() < 0 or values.max() > 0xFFFF:
            raise BadImageError(f"its pixel mode {image.mode} cannot be converted to RGB")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")  # the upper 8 bits of 16-bit grey
    if image.has_transparency_data:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, "white")
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def _reason(error: Exception) -> str:
    return f"the image cannot be read: {type(error).__name__}: {error}"[:200]


def join_frames(frames: Sequence[bytes]) -> bytes:
    """Return the image files of several frames as one."""
    assert 1 <= len(frames) <= MAX_TOGETHER
    return MAGIC + COUNT.pack(len(frames)) + b"".join(LENGTH.pack(len(each)) for each in frames) + b"".join(frames)


def split_frames(data: bytes) -> list[bytes]:
    """Return the image files of joined frames; the data itself if it is one image. The last may be incomplete."""
    if not data.startswith(MAGIC):
        return [data]
    at = len(MAGIC)
    (count,) = COUNT.unpack_from(data, at)
    assert 1 <= count <= MAX_TOGETHER, "only join_frames writes these bytes"
    lengths = [LENGTH.unpack_from(data, at + COUNT.size + number * LENGTH.size)[0] for number in range(count)]
    at += COUNT.size + count * LENGTH.size
    frames = []
    for length in lengths:
        frames.append(data[at : at + length])
        at += length
    return frames
