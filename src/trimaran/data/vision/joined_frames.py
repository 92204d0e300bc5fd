"""Frames of a video that share a temporal patch, stored together where one image would be."""

import struct
from collections.abc import Sequence

MAGIC = b"trimaran-frames-1\n"
COUNT, LENGTH = struct.Struct("<I"), struct.Struct("<Q")
MAX_TOGETHER = 16


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
