"""Frames of video files, decoded by PyAV. Imported only if the data has video files."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import av
from av.container import InputContainer
from av.video.frame import VideoFrame

from trimaran.data.quarantine import BadSampleError

MAX_FRAMES_IN_FILE = 1_000_000
JPEG_QUALITY = 95
FRAME_MARGIN = 1e-6  # seconds: two times closer than this are of the same frame


def frame_times(path: str) -> list[float]:
    """Return the time of every frame of the first video stream, in seconds, sorted. Nothing is decoded."""
    with _opened(path) as container:
        stream = container.streams.video[0]
        base = stream.time_base or 0
        times = sorted(float(packet.pts * base) for packet in container.demux(stream)
                       if packet.pts is not None and packet.size and not packet.is_discard)  # fmt: skip
    if not times:
        raise BadSampleError(f"a video has no frames: {path}")
    if len(times) > MAX_FRAMES_IN_FILE:
        raise BadSampleError(f"a video has more than {MAX_FRAMES_IN_FILE:,} frames: {path}")
    return times


def decode_frames(path: str, times: Sequence[float]) -> list[bytes]:
    """Return the frames at these times, which increase, as JPEG files. They are rotated as the video says."""
    frames: list[bytes] = []
    with _opened(path) as container:
        for frame in container.decode(container.streams.video[0]):
            while (
                len(frames) < len(times) and frame.time is not None and frame.time >= times[len(frames)] - FRAME_MARGIN
            ):
                frames.append(_jpeg(frame))
            if len(frames) == len(times):
                return frames
    raise BadSampleError(f"a video ends after {len(frames)} of {len(times)} chosen frames: {path}")


@contextmanager
def _opened(path: str) -> Iterator[InputContainer]:
    try:
        with av.open(path) as container:
            if not container.streams.video:
                raise BadSampleError(f"the file has no video: {path}")
            yield container
    except (av.FFmpegError, OSError, ValueError) as error:
        raise BadSampleError(f"a video cannot be decoded: {type(error).__name__}: {error}"[:200]) from None


def _jpeg(frame: VideoFrame) -> bytes:
    image = frame.to_image()
    if frame.rotation:
        image = image.rotate(frame.rotation, expand=True)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return stream.getvalue()
