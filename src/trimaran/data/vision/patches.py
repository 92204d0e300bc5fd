"""Cuts pixels into patches. Patches that are merged into one token are adjacent."""

import numpy as np

from trimaran.core import ImageRules
from trimaran.data.vision.decode import pixels_of, split_frames
from trimaran.data.vision.image_grid import anyres_tiles, canvas_of, tile_side

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
