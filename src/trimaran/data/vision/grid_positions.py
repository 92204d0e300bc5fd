"""Position ids of tokens (time, row, column), in the convention of Qwen2-VL."""

from collections.abc import Sequence

import numpy as np

ALONE = -1  # the time of an image that does not continue a video


def grid_positions(length: int, images: Sequence[tuple[int, int, int]], times: Sequence[int] = ()) -> np.ndarray:
    """Return time, row and column i64 [3, length] of one document.

    `images` are in order: the index of the first token of each, and its rows and columns of tokens. Positions of text
    increase by one per token. All tokens of an image share one time; rows and columns count from there. With `times`,
    an image whose time is not ALONE continues the image before it as a video: it is so much later than the first one,
    and its rows and columns count from the same position. The text after an image or a video continues after the
    largest of its positions.
    """
    ids = np.empty((3, length), dtype=np.int64)
    start, position, at = 0, 0, 0
    for (first, rows, columns), time in zip(images, times or (ALONE,) * len(images), strict=True):
        if time == ALONE:
            ids[:, at:first] = np.arange(position, position + first - at)
            start = position = position + first - at
        assert time == ALONE or first == at, "no text is inside a video"
        at = first + rows * columns
        ids[0, first:at] = start + max(0, time)
        ids[1, first:at] = start + np.repeat(np.arange(rows), columns)
        ids[2, first:at] = start + np.tile(np.arange(columns), rows)
        position = max(position, start + max(rows, columns, time + 1))
    ids[:, at:] = np.arange(position, position + length - at)
    return ids
