"""Where tokens are: the time, row and column of each, as Qwen2-VL counts them."""

from collections.abc import Iterable

import numpy as np


def grid_positions(length: int, images: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """Return time, row and column i64 [3, length] of one document.

    `images` are in order: the place of the first token of each, and its rows and columns of tokens. Text counts on by
    one. An image stands still in time, its rows and columns count from there, and the text after it goes on behind the
    larger of the two.
    """
    found = np.empty((3, length), dtype=np.int64)
    place, at = 0, 0
    for first, rows, columns in images:
        found[:, at:first] = np.arange(place, place + first - at)
        place += first - at
        at = first + rows * columns
        found[0, first:at] = place
        found[1, first:at] = place + np.repeat(np.arange(rows), columns)
        found[2, first:at] = place + np.tile(np.arange(columns), rows)
        place += max(rows, columns)
    found[:, at:] = np.arange(place, place + length - at)
    return found
