"""How large a picture is, from its first bytes: nothing is decoded."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.raw_sample import ImageLocation, Picture
from trimaran.data.vision.decode import BadPictureError, upright_size

HEAD_BYTES = 1 << 16
MAX_RATIO = 200  # of the longer side to the shorter one: on such a strip nothing can be seen
THREADS = 8

Measured = tuple[Picture, int, int]


class Ruler:
    """Measures pictures, several at a time: a disk across a network answers late, but many at once."""

    def __init__(self) -> None:
        Image.init()  # Pillow finds its formats when first asked, which two threads must not do at once
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ruler")

    def measure(self, samples: Sequence[Sequence[Picture]]) -> list[tuple[Measured, ...] | BadSampleError]:
        """Return the pictures of each sample with width and height, or what is wrong with the first bad one."""
        slices = [samples[start::THREADS] for start in range(THREADS)]
        found = list(self._pool.map(lambda part: [_measure_all(each) for each in part], slices))
        return [found[number % THREADS][number // THREADS] for number in range(len(samples))]

    def close(self) -> None:
        self._pool.shutdown()


def _measure_all(pictures: Sequence[Picture]) -> tuple[Measured, ...] | BadSampleError:
    try:
        return tuple(_measure(picture) for picture in pictures)
    except BadSampleError as error:
        return error


def _measure(picture: Picture) -> Measured:
    """Return the picture, its place with its length in it, and its width and height as they are to be looked at."""
    if isinstance(picture, bytes):
        return (picture, *_size(picture, "a picture inside the row"))
    try:
        with open(picture.file, "rb", buffering=0) as stream:
            length = os.fstat(stream.fileno()).st_size if picture.length < 0 else picture.length
            head = os.pread(stream.fileno(), min(length, HEAD_BYTES), picture.offset)
            try:
                size = _size(head, picture.file)
            except BadSampleError:
                if length <= HEAD_BYTES:
                    raise
                size = _size(os.pread(stream.fileno(), length, picture.offset), picture.file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadSampleError(f"the picture cannot be read: {reason}: {picture.file}") from None
    return (ImageLocation(picture.file, picture.offset, length), *size)


def _size(head: bytes, name: str) -> tuple[int, int]:
    try:
        width, height = upright_size(head)
    except BadPictureError as error:
        broken = "cannot identify" in str(error)  # Pillow's words name an object in memory and not the file
        reason = "this is no picture, or its beginning is broken" if broken else str(error)
        raise BadSampleError(f"{reason}: {name}") from None
    if width < 1 or height < 1 or max(width, height) > MAX_RATIO * min(width, height):
        reason = f"one side is more than {MAX_RATIO} times the other" if min(width, height) > 0 else "it is empty"
        raise BadSampleError(f"a picture of {width} x {height} pixels, {reason}: {name}")
    return width, height
