"""LLaVA-OneVision's images of any resolution: a grid of tiles with padding, whose tokens are cut out and rescaled."""

import math
from dataclasses import dataclass

import numpy as np

from trimaran.core import ImageRules
from trimaran.data.vision.decode import pixels_of

MAX_TILES_OF_TOKENS = 9  # tokens of more tiles than this are rescaled to as many (`anyres_max_9`)
MIN_RESCALE = 1.1
NEWLINE = -1


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """How the tokens of an image follow from its patches: weighted sums of four of them, or the learned newline.

    `sources` i32 [tokens, 4] are patches, counted from the first one of the image, or NEWLINE; `weights` f32 alike.
    """

    sources: np.ndarray
    weights: np.ndarray


def anyres_canvases(sizes: np.ndarray, rules: ImageRules) -> np.ndarray:
    """Return rows and columns of tiles [images, 2]: the grid that shows most of an image's pixels and wastes least."""
    width, height = sizes[:, 0].astype(np.float64), sizes[:, 1].astype(np.float64)
    best = np.ones((len(sizes), 2), dtype=np.int64)
    most, least = np.zeros(len(sizes)), np.full(len(sizes), np.inf)
    side = math.isqrt(rules.max_tiles)
    for rows in range(1, side + 1):
        for columns in range(1, side + 1):
            tall, wide = rows * rules.tile, columns * rules.tile
            scale = np.minimum(wide / width, tall / height)
            shown = np.minimum((width * scale).astype(np.int64) * (height * scale).astype(np.int64), width * height)
            wasted = tall * wide - shown
            taken = (shown > most) | ((shown == most) & (wasted < least))
            best[taken] = rows, columns
            most, least = np.where(taken, shown, most), np.where(taken, wasted, least)
    return best


def token_grid(size: tuple[int, int], canvas: tuple[int, int], side: int) -> tuple[int, int, int, int]:
    """Return the tokens of an image of `size` (width, height): rows and columns without padding, and after rescaling.

    `canvas` are its rows and columns of tiles, `side` the patches per side of a tile.
    """
    (width, height), rows, columns = size, canvas[0] * side, canvas[1] * side
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    ratio = math.sqrt(rows * columns / (MAX_TILES_OF_TOKENS * side**2))
    if ratio <= MIN_RESCALE:
        return rows, columns, rows, columns
    return rows, columns, int(rows // ratio), int(columns // ratio)


def num_anyres_tokens(sizes: np.ndarray, canvases: np.ndarray, side: int) -> np.ndarray:
    """Return the number of tokens of each image: those of its thumbnail, its rows, and a newline after each row."""
    grids = (token_grid(tuple(size), tuple(canvas), side) for size, canvas in zip(sizes.tolist(), canvases.tolist(),
                                                                                 strict=True))  # fmt: skip
    return np.array([side**2 + rows * (columns + 1) for _, _, rows, columns in grids], dtype=np.int64)


def anyres_layout(size: tuple[int, int], canvas: tuple[int, int], side: int) -> TokenLayout:
    """Return how the tokens of an image follow from its patches: first the thumbnail's, then tile after tile."""
    rows, columns, out_rows, out_columns = token_grid(size, canvas, side)
    first = [(whole * side - kept) // 2 for whole, kept in zip(canvas, (rows, columns), strict=True)]
    tops, downs = _neighbours(rows, out_rows)
    lefts, rights = _neighbours(columns, out_columns)
    corners, weights = [], []
    for row, row_weight in ((tops, 1 - downs), (np.minimum(tops + 1, rows - 1), downs)):
        for column, column_weight in ((lefts, 1 - rights), (np.minimum(lefts + 1, columns - 1), rights)):
            corners.append(_patch_numbers(row[:, None] + first[0], column[None] + first[1], canvas[1], side))
            weights.append(np.broadcast_to(row_weight[:, None] * column_weight[None], corners[-1].shape))
    sources, factors = np.stack(corners, -1), np.stack(weights, -1)
    end = np.full((out_rows, 1, 4), NEWLINE)
    sources = np.concatenate([sources, end], 1).reshape(-1, 4)
    factors = np.concatenate([factors, np.broadcast_to(_ONE, end.shape)], 1).reshape(-1, 4)
    base = np.arange(side**2)[:, None].repeat(4, 1)
    return TokenLayout(
        np.concatenate([base, sources]).astype(np.int32),
        np.concatenate([np.broadcast_to(_ONE, base.shape), factors]).astype(np.float32),
    )


_ONE = np.array([1.0, 0.0, 0.0, 0.0])


def anyres_tiles(data: bytes, size: tuple[int, int], canvas: tuple[int, int], rules: ImageRules) -> list[np.ndarray]:
    """Return the thumbnail and the tiles of an image, u8 [tile, tile, 3] each; the padding is black."""
    (width, height), tile = size, rules.tile
    tall, wide = canvas[0] * tile, canvas[1] * tile
    if wide / width < tall / height:
        inside = (wide, min(math.ceil(height * (wide / width)), tall))
    else:
        inside = (min(math.ceil(width * (tall / height)), wide), tall)
    pixels, thumbnail = pixels_of(data, [inside, (tile, tile)])
    padded = np.zeros((tall, wide, 3), dtype=np.uint8)
    top, left = (tall - inside[1]) // 2, (wide - inside[0]) // 2
    padded[top : top + inside[1], left : left + inside[0]] = pixels
    tiles = padded.reshape(canvas[0], tile, canvas[1], tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
    return [thumbnail, *tiles]


def _neighbours(length: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the entry before each of `out` points between `length` entries, and the weight of the next one.

    As torch interpolates in fp32 without aligned corners.
    """
    scale = np.float32(length) / np.float32(out)
    at = np.maximum((np.arange(out, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), np.float32(0))
    before = np.minimum(at.astype(np.int64), length - 1)
    return before, (at - before).astype(np.float64)


def _patch_numbers(row: np.ndarray, column: np.ndarray, tiles_across: int, side: int) -> np.ndarray:
    """Return the number of the patch at a row and column of the whole grid; the thumbnail's patches come first."""
    tile = 1 + row // side * tiles_across + column // side
    return tile * side**2 + row % side * side + column % side
