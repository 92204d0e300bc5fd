"""Reads the size of an image from its first bytes, without decoding it."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from trimaran.core.regular_files import open_regular_file
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.raw_sample import ImageLocation, ImageSource, SizedImage
from trimaran.data.vision.decode import BadImageError, upright_size

HEAD_BYTES = 1 << 16
MAX_ASPECT_RATIO = 200
NUM_THREADS = 8


class ImageSizeReader:
    """Reads image sizes with several threads: a network file system has high latency but serves many at once."""

    def __init__(self) -> None:
        Image.init()  # Pillow registers its formats on first use, which is not thread-safe
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="image-size")

    def read_sizes(self, samples: Sequence[Sequence[ImageSource]]) -> list[tuple[SizedImage, ...] | BadSampleError]:
        """Return the images of each sample with width and height, or the error of its first bad image."""
        slices = [samples[start::NUM_THREADS] for start in range(NUM_THREADS)]
        results = list(self._pool.map(lambda part: [_sized_images(each) for each in part], slices))
        return [results[number % NUM_THREADS][number // NUM_THREADS] for number in range(len(samples))]

    def close(self) -> None:
        self._pool.shutdown()


def _sized_images(images: Sequence[ImageSource]) -> tuple[SizedImage, ...] | BadSampleError:
    try:
        return tuple(_sized(image) for image in images)
    except BadSampleError as error:
        return error


def _sized(image: ImageSource) -> SizedImage:
    """Return the image (with its length in bytes), and its upright width and height."""
    if isinstance(image, bytes):
        return (image, *_size(image, "an image inside the row"))
    try:
        with open_regular_file(image.file, follow_links=True) as stream:
            length = os.fstat(stream.fileno()).st_size if image.length < 0 else image.length
            head = os.pread(stream.fileno(), min(length, HEAD_BYTES), image.offset)
            try:
                size = _size(head, image.file)
            except BadSampleError:
                if length <= HEAD_BYTES:
                    raise
                size = _size(os.pread(stream.fileno(), length, image.offset), image.file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadSampleError(f"the image cannot be read: {reason}: {image.file}") from None
    return (ImageLocation(image.file, image.offset, length), *size)


def _size(head: bytes, name: str) -> tuple[int, int]:
    try:
        width, height = upright_size(head)
    except BadImageError as error:
        unknown = "cannot identify" in str(error)  # Pillow's message names an object in memory, not the file
        reason = "this is not an image, or its header is damaged" if unknown else str(error)
        raise BadSampleError(f"{reason}: {name}") from None
    if width < 1 or height < 1 or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        too_long = f"one side is more than {MAX_ASPECT_RATIO} times the other"
        reason = too_long if min(width, height) > 0 else "it is empty"
        raise BadSampleError(f"an image of {width} x {height} pixels, {reason}: {name}")
    return width, height
