"""Image sizes in patches and tokens, for many images at once, and the positions of their tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.core import ImageRules
from trimaran.data.vision.decode import pixels_of, split_frames

GREY = 128  # of a blank image


def fill_patches(data: bytes, size: tuple[int, int], rules: ImageRules, out: np.ndarray) -> None:
    """Write the patches of an image of `size` (width, height) to `out` u8 [patches, 3 * frames * patch * patch].

    Joined frames share their patches; an image is repeated in all frames.
    """
    rows, columns = canvas_of(size, rules)
    native_size = (columns * rules.patch, rows * rules.patch)
    if rules.variant == "native" and rules.frames > 1:  # ordered by channel, frame, row, column: Qwen2-VL's order
        frames = split_frames(data)
        target = out.reshape(len(out), 3, rules.frames, rules.patch**2)
        one = np.empty((len(out), 3 * rules.patch**2), dtype=out.dtype)
        for number in range(rules.frames):
            if number < len(frames):  # the last frame is repeated
                cut_patches(pixels_of(frames[number], [native_size])[0], rules, one)
            target[:, :, number] = one.reshape(len(out), 3, -1)
        return
    if rules.variant == "native":
        cut_patches(pixels_of(data, [native_size])[0], rules, out)
        return
    side = tile_side(rules)
    pixels, per_tile = side * rules.patch, side * side
    if rules.variant == "anyres":
        ordered = anyres_tiles(data, size, (rows, columns), rules)
    else:
        full_size = (columns * pixels, rows * pixels)
        has_thumbnail = rows * columns > 1 and rules.thumbnail != "none"
        canvas, *thumbnail = pixels_of(data, [full_size, (pixels, pixels)] if has_thumbnail else [full_size])
        tiles = canvas.reshape(rows, pixels, columns, pixels, 3).swapaxes(1, 2).reshape(-1, pixels, pixels, 3)
        ordered = [*tiles, *thumbnail] if rules.thumbnail == "last" else [*thumbnail, *tiles]
    for number, tile in enumerate(ordered):  # the last pixels of a tile may make no complete patch
        cut_patches(tile[:pixels, :pixels], rules, out[number * per_tile : (number + 1) * per_tile])


def cut_patches(pixels: np.ndarray, rules: ImageRules, out: np.ndarray) -> None:
    """Write u8 [height, width, 3] to `out` [patches, 3 * patch * patch]. A patch is ordered by channel, row, column.

    The patches of a merge x merge group are adjacent, row by row, and so are the groups: Qwen2-VL's order.
    """
    patch, merge = rules.patch, rules.merge
    group_rows, group_columns = pixels.shape[0] // (patch * merge), pixels.shape[1] // (patch * merge)
    assert out.shape == (group_rows * group_columns * merge**2, 3 * patch * patch), (
        "the image size does not match `out`"
    )
    blocks = pixels.reshape(group_rows, merge, patch, group_columns, merge, patch, 3)
    target = out.reshape(group_rows, group_columns, merge, merge, 3, patch, patch)
    target[:] = blocks.transpose(0, 3, 1, 4, 6, 2, 5)


MAX_TILES_OF_TOKENS = 9  # tokens of more tiles than this are rescaled to as many (`anyres_max_9`)
MIN_RESCALE = 1.1
NEWLINE = -1
_ONE = np.array([1.0, 0.0, 0.0, 0.0])
ALONE = -1  # the time of an image that does not continue a video


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


def anyres_layout(size: tuple[int, int], rules: ImageRules) -> TokenLayout:
    """Return how the tokens of an image follow from its patches: first the thumbnail's, then tile after tile."""
    canvas, side = canvas_of(size, rules), tile_side(rules)
    rows, columns, out_rows, out_columns = token_grid(size, canvas, side)
    first = [(whole * side - kept) // 2 for whole, kept in zip(canvas, (rows, columns), strict=True)]
    tops, downs = _neighbours(rows, out_rows)
    lefts, rights = _neighbours(columns, out_columns)
    corners, weights = [], []
    for row, row_weight in ((tops, 1 - downs), (np.minimum(tops + 1, rows - 1), downs)):
        for column, column_weight in ((lefts, 1 - rights), (np.minimum(lefts + 1, columns - 1), rights)):
            down, across = row[:, None] + first[0], column[None] + first[1]  # of the whole grid
            tile = 1 + down // side * canvas[1] + across // side  # the thumbnail's patches come first
            corners.append(tile * side**2 + down % side * side + across % side)
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
    """Return the entry before each of `out` points between `length` entries, and the weight of the next one."""
    # As torch interpolates in fp32 without aligned corners.
    scale = np.float32(length) / np.float32(out)
    at = np.maximum((np.arange(out, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), np.float32(0))
    before = np.minimum(at.astype(np.int64), length - 1)
    return before, (at - before).astype(np.float64)


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """Per image: its tokens in the text, its patches, and the pairs of patches that attend to each other."""

    tokens: np.ndarray
    patches: np.ndarray
    patch_pairs: np.ndarray


def measure_images(sizes: np.ndarray, rules: ImageRules) -> ImageSizes:
    """Return tokens and patches of images of `sizes` [number of images, 2] (width, height)."""
    sizes = np.asarray(sizes, dtype=np.int64).reshape(-1, 2)
    canvases = CANVASES[rules.variant](sizes, rules)
    rows, columns = canvases.T
    if rules.variant == "native":
        patches = rows * columns
        return ImageSizes(patches // rules.merge**2, patches, patches**2)
    tiles, side = rows * columns, tile_side(rules)
    per_tile, is_anyres = side**2, rules.variant == "anyres"
    tiles = tiles + (is_anyres | ((tiles > 1) & (rules.thumbnail != "none")))
    tokens = tiles * per_tile // rules.merge**2
    if is_anyres:  # those of the thumbnail, the rows, and a newline after each row
        pairs = zip(sizes.tolist(), canvases.tolist(), strict=True)
        grids = (token_grid((size[0], size[1]), (canvas[0], canvas[1]), side) for size, canvas in pairs)
        counts = [per_tile + height * (width + 1) for _, _, height, width in grids]
        tokens = np.array(counts, dtype=np.int64)
    return ImageSizes(tokens, tiles * per_tile, tiles * per_tile**2)


def grids_of(size: tuple[int, int], rules: ImageRules) -> np.ndarray:
    """Return rows and columns of patches of each part of an image: itself, or tiles and a thumbnail if several."""
    rows, columns = canvas_of(size, rules)
    if rules.variant == "native":
        return np.array([[rows, columns]], dtype=np.int32)
    tiles = rows * columns
    tiles += rules.variant == "anyres" or (tiles > 1 and rules.thumbnail != "none")
    return np.full((tiles, 2), tile_side(rules), dtype=np.int32)


def canvas_of(size: tuple[int, int], rules: ImageRules) -> tuple[int, int]:
    """Return rows and columns of one image of `size` (width, height): of patches if native, of tiles if tiled."""
    rows, columns = CANVASES[rules.variant](np.array([size], dtype=np.int64), rules)[0].tolist()
    return rows, columns


def tile_side(rules: ImageRules) -> int:
    """Return the number of patches per side of a tile: a multiple of `merge`."""
    return rules.tile // (rules.patch * rules.merge) * rules.merge


def _native(sizes: np.ndarray, rules: ImageRules) -> np.ndarray:
    """Return rows and columns of patches, rounded to groups of `merge` and within the pixel limits, as Qwen2-VL."""
    factor = rules.patch * rules.merge
    sides = sizes[:, ::-1].astype(np.float64)  # height, width
    area = sides.prod(axis=1)
    groups = np.round(sides / factor)
    pixels = groups.prod(axis=1) * factor**2
    shrink = np.sqrt(area / rules.max_pixels)[:, None]
    stretch = np.sqrt(rules.min_pixels / area)[:, None]
    smaller = np.maximum(1, np.floor(sides / shrink / factor))
    larger = np.ceil(sides * stretch / factor) if rules.min_pixels else groups
    groups = np.where((pixels > rules.max_pixels)[:, None], smaller, groups)
    groups = np.where((pixels < rules.min_pixels)[:, None], larger, groups)
    return np.maximum(1, groups).astype(np.int64) * rules.merge


def _tiled(sizes: np.ndarray, rules: ImageRules) -> np.ndarray:
    """Return rows and columns of tiles: the layout whose aspect ratio is nearest to the image's."""
    # Of layouts with the same ratio, the larger one is taken if the image has at least half as many pixels.
    limit = rules.max_tiles
    layouts = [(columns, rows) for columns in range(1, limit + 1) for rows in range(1, limit // columns + 1)]
    ratio, area = sizes[:, 0] / sizes[:, 1], sizes.prod(axis=1)
    nearest, best = np.full(len(sizes), np.inf), np.ones((len(sizes), 2), dtype=np.int64)
    for columns, rows in sorted(layouts, key=lambda each: each[0] * each[1]):
        distance = np.abs(ratio - columns / rows)
        enough = area > 0.5 * rules.tile**2 * rows * columns
        taken = (distance < nearest) | ((distance == nearest) & enough)
        best[taken] = rows, columns
        nearest = np.minimum(nearest, distance)
    return best


CANVASES = {"native": _native, "tiled": _tiled, "anyres": anyres_canvases}


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
