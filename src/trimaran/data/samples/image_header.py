"""How large an image is, from its first bytes: nothing is decoded."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.raw_sample import ImageLocation, Picture
from trimaran.data.vision.decode import BadImageError, upright_size

HEAD_BYTES = 1 << 16
MAX_RATIO = 200  # of the longer side to the shorter one: on such a strip nothing can be seen
THREADS = 8

Measured = tuple[Picture, int, int]


class Ruler:
    """Measures images, several at a time: a disk across a network answers late, but many at once."""

    def __init__(self) -> None:
        Image.init()  # Pillow finds its formats when first asked, which two threads must not do at once
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ruler")

    def measure(self, samples: Sequence[Sequence[Picture]]) -> list[tuple[Measured, ...] | BadSampleError]:
        """Return the images of each sample with width and height, or what is wrong with the first bad one."""
        slices = [samples[start::THREADS] for start in range(THREADS)]
        found = list(self._pool.map(lambda part: [_measure_all(each) for each in part], slices))
        return [found[number % THREADS][number // THREADS] for number in range(len(samples))]

    def close(self) -> None:
        self._pool.shutdown()


def _measure_all(images: Sequence[Picture]) -> tuple[Measured, ...] | BadSampleError:
    try:
        return tuple(_measure(image) for image in images)
    except BadSampleError as error:
        return error


def _measure(image: Picture) -> Measured:
    """Return the image, its place with its length in it, and its width and height as they are to be looked at."""
    if isinstance(image, bytes):
        return (image, *_size(image, "an image inside the row"))
    try:
        with open(image.file, "rb", buffering=0) as stream:
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
        broken = "cannot identify" in str(error)  # Pillow's words name an object in memory and not the file
        reason = "this is no image, or its beginning is broken" if broken else str(error)
        raise BadSampleError(f"{reason}: {name}") from None
    if width < 1 or height < 1 or max(width, height) > MAX_RATIO * min(width, height):
        reason = f"one side is more than {MAX_RATIO} times the other" if min(width, height) > 0 else "it is empty"
        raise BadSampleError(f"an image of {width} x {height} pixels, {reason}: {name}")
    return width, height
