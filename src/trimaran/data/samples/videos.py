"""Videos as samples: frames with their times. Some frames are chosen, and each becomes an image after its time."""

import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from trimaran.core import open_regular_file
from trimaran.data.lazy_import import require
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.raw_sample import FrameChoice, ImageLocation, ImageSource, Video
from trimaran.data.vision.decode import join_frames

FRAME_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".mpeg")
MAX_FRAMES = 1_000_000  # in a video
MAX_RATE = 1e6  # frames per second
MAX_TIME_POSITION = 1 << 24  # up to which fp32 has every whole number
JPEG_QUALITY = 95
FRAME_MARGIN = 1e-6  # seconds: two times closer than this are of the same frame


def read_video(value: Any, find: Callable[[Any], ImageSource], choice: FrameChoice) -> Video:
    """Return the chosen frames of a video: a file, or a mapping with `frames`, a folder or a list, and their times.

    The times are `fps` or `times`; a file has its own. `find` resolves the reference of a file, a frame or a folder.
    Raises BadSampleError if the video cannot be used, and UserError if the package that decodes files is missing.
    """
    if isinstance(value, Mapping) and "frames" not in value:
        value = next((value[key] for key in ("path", "url", "video") if value.get(key)), value)
    if isinstance(value, str) and value.lower().endswith(VIDEO_SUFFIXES):
        located = find(value)
        if not isinstance(located, ImageLocation):
            raise BadSampleError(f"a video is not a file: {value[:80]!r}")
        require("av", where=value[:80], extra="video")
        with _opened(located.file) as container:  # nothing is decoded yet
            stream = container.streams.video[0]
            base = stream.time_base or 0
            times = sorted(float(packet.pts * base) for packet in container.demux(stream)
                           if packet.pts is not None and packet.size and not packet.is_discard)  # fmt: skip
        if not times:
            raise BadSampleError(f"a video has no frames: {located.file}")
        if len(times) > MAX_FRAMES:
            raise BadSampleError(f"a video has more than {MAX_FRAMES:,} frames: {located.file}")
        seconds = [times[each] for each in choose_frames(times, choice)]
        return _joined(decode_frames(located.file, seconds), [each - times[0] for each in seconds], choice)
    if not isinstance(value, Mapping):
        raise BadSampleError("a video is not an object with 'frames' and 'fps' or 'times'")
    listed: Any = value.get("frames")
    frames: Sequence[Any] = listed
    if not isinstance(listed, list):
        folder = find(listed) if isinstance(listed, str) and listed else None
        if not isinstance(folder, ImageLocation):
            raise BadSampleError("the frames of a video are neither a folder nor a list")
        try:
            names = sorted(os.listdir(folder.file))
        except OSError as error:
            raise BadSampleError(f"the frames of a video cannot be read: {error.strerror}: {listed[:80]}") from None
        frames = [os.path.join(folder.file, each) for each in names if each.lower().endswith(FRAME_SUFFIXES)]
    if not frames:
        raise BadSampleError("a video has no frames")
    if len(frames) > MAX_FRAMES:
        raise BadSampleError(f"a video has more than {MAX_FRAMES:,} frames")
    times = _times(value, len(frames))
    chosen = choose_frames(times, choice)
    return _joined([find(frames[each]) for each in chosen], [times[each] - times[0] for each in chosen], choice)


def choose_frames(times: Sequence[float], choice: FrameChoice) -> list[int]:
    """Return the numbers of the frames nearest to each point of time at which there should be one, in order."""
    at = np.asarray(times, dtype=np.float64)
    wanted = np.arange(math.floor((at[-1] - at[0]) * choice.per_second + 1e-6) + 1) / choice.per_second + at[0]
    after = np.searchsorted(at, wanted).clip(0, len(at) - 1)
    before = (after - 1).clip(0)
    nearest = np.where(wanted - at[before] <= at[after] - wanted, before, after)
    unique = np.unique(nearest)
    if len(unique) > choice.most:
        unique = unique[np.linspace(0, len(unique) - 1, choice.most).round().astype(np.int64)]
    return unique.tolist()


def _joined(frames: Sequence[ImageSource], times: Sequence[float], choice: FrameChoice) -> Video:
    """Return the video. Frames that share a patch become one image, at the middle of their times.

    The last frame is repeated if the number does not divide, as Qwen-VL's processors do.
    """
    if choice.together == 1:
        return Video(tuple(frames), tuple(round(each, 3) for each in times))
    positions = block_positions(times, choice)
    missing = -len(frames) % choice.together
    frames, times = [*frames, *[frames[-1]] * missing], [*times, *[times[-1]] * missing]
    starts = range(0, len(frames), choice.together)
    joined = [join_frames([_content(each) for each in frames[at : at + choice.together]]) for at in starts]
    middles = [(times[at] + times[at + choice.together - 1]) / 2 for at in starts]
    return Video(tuple(joined), tuple(round(each, 3) for each in middles), positions)


def block_positions(times: Sequence[float], choice: FrameChoice) -> tuple[int, ...]:
    """Return the time positions of a video's images, from 0 on; none if they are not one block.

    A video of Qwen2.5-VL has one number of seconds for each image, here the mean; products are rounded as in its code.
    """
    if choice.time_positions is None:
        return ()
    numbers = np.arange(-(-len(times) // choice.together))
    if not choice.time_positions:
        return tuple(numbers.tolist())
    seconds = np.float32(choice.together * (times[-1] - times[0]) / max(1, len(times) - 1))
    positions = numbers.astype(np.float32) * (np.float32(choice.time_positions) * seconds)
    if not positions[-1] <= MAX_TIME_POSITION:
        raise BadSampleError(f"a video of {times[-1] - times[0]:.3g} seconds is too long for its time positions")
    return tuple(positions.astype(np.int64).tolist())


def _content(frame: ImageSource) -> bytes:
    if isinstance(frame, bytes):
        return frame
    try:
        with open_regular_file(frame.file, follow_links=True) as stream:
            stream.seek(frame.offset)
            return stream.read(frame.length)
    except (OSError, ValueError) as error:
        raise BadSampleError(f"a frame of a video cannot be read: {error}"[:200]) from None


def _times(value: Mapping[str, Any], count: int) -> list[float]:
    """Return the time of each frame in seconds."""
    if (listed := value.get("times")) is not None:
        if not isinstance(listed, list) or not all(_is_number(each) for each in listed):
            raise BadSampleError("the times of a video are not a list of numbers")
        if len(listed) != count:
            raise BadSampleError(f"a video has {count} frames and {len(listed)} times")
        for earlier, later in pairwise(listed):
            if later < earlier:
                raise BadSampleError(f"the times of a video go backwards: {later:g} after {earlier:g}")
        return [float(each) for each in listed]
    rate: Any = value.get("fps")
    if not _is_number(rate) or not 0 < rate <= MAX_RATE:
        raise BadSampleError("a video has neither 'times' nor a positive number 'fps'")
    return [number / rate for number in range(count)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def decode_frames(path: str, times: Sequence[float]) -> list[bytes]:
    """Return the frames at these times, which increase, as JPEG files. They are rotated as the video says."""
    frames: list[bytes] = []
    with _opened(path) as container:
        for frame in container.decode(container.streams.video[0]):
            while (
                len(frames) < len(times) and frame.time is not None and frame.time >= times[len(frames)] - FRAME_MARGIN
            ):
                image, stream = frame.to_image(), io.BytesIO()
                if frame.rotation:
                    image = image.rotate(frame.rotation, expand=True)
                image.save(stream, "JPEG", quality=JPEG_QUALITY, subsampling=0)
                frames.append(stream.getvalue())
            if len(frames) == len(times):
                return frames
    raise BadSampleError(f"a video ends after {len(frames)} of {len(times)} chosen frames: {path}")


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    import av  # noqa: PLC0415  optional

    try:
        with av.open(path) as container:
            if not container.streams.video:
                raise BadSampleError(f"the file has no video: {path}")
            yield container
    except (av.FFmpegError, OSError, ValueError) as error:
        raise BadSampleError(f"a video cannot be decoded: {type(error).__name__}: {error}"[:200]) from None
