"""Position ids of tokens (time, row, column), in the convention of Qwen2-VL."""

from collections.abc import Iterable

import numpy as np


def grid_positions(length: int, images: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """Return time, row and column i64 [3, length] of one document.

    `images` are in order: the index of the first token of each, and its rows and columns of tokens. Positions of text
    increase by one per token. All tokens of an image share one time; rows and columns count from there. The text after
    an image continues after the larger of its two sides.
    """
    ids = np.empty((3, length), dtype=np.int64)
    position, at = 0, 0
    for first, rows, columns in images:
        ids[:, at:first] = np.arange(position, position + first - at)
        position += first - at
        at = first + rows * columns
        ids[0, first:at] = position
        ids[1, first:at] = position + np.repeat(np.arange(rows), columns)
        ids[2, first:at] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns)
    ids[:, at:] = np.arange(position, position + length - at)
    return ids
