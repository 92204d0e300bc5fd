"""Image sizes in patches and tokens, for many images at once."""

from dataclasses import dataclass

import numpy as np

from trimaran.core import ImageRules
from trimaran.data.vision.anyres import TokenLayout, anyres_canvases, anyres_layout, num_anyres_tokens


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """Per image: its tokens in the text, its patches, and the pairs of patches that attend to each other."""

    tokens: np.ndarray
    patches: np.ndarray
    patch_pairs: np.ndarray


def measure_images(sizes: np.ndarray, rules: ImageRules) -> ImageSizes:
    """Return tokens and patches of images of `sizes` [number of images, 2] (width, height)."""
    sizes = np.asarray(sizes, dtype=np.int64).reshape(-1, 2)
    canvases = _canvases(sizes, rules)
    rows, columns = canvases.T
    if rules.variant == "native":
        patches = rows * columns
        return ImageSizes(patches // rules.merge**2, patches, patches**2)
    tiles, side = rows * columns, tile_side(rules)
    per_tile = side**2
    if rules.variant == "anyres":
        tiles = tiles + 1
        tokens = num_anyres_tokens(sizes, canvases, side)
        return ImageSizes(tokens, tiles * per_tile, tiles * per_tile**2)
    tiles += (tiles > 1) & (rules.thumbnail != "none")
    return ImageSizes(tiles * per_tile // rules.merge**2, tiles * per_tile, tiles * per_tile**2)


def grids_of(size: tuple[int, int], rules: ImageRules) -> np.ndarray:
    """Return the grids [number of parts, 2] (rows, columns of patches) of one image of `size` (width, height).

    A native image is one part. A tiled image is its tiles and, if there are several, a thumbnail.
    """
    rows, columns = canvas_of(size, rules)
    if rules.variant == "native":
        return np.array([[rows, columns]], dtype=np.int32)
    tiles = rows * columns
    if rules.variant == "anyres":
        return np.full((tiles + 1, 2), tile_side(rules), dtype=np.int32)
    tiles += tiles > 1 and rules.thumbnail != "none"
    return np.full((tiles, 2), tile_side(rules), dtype=np.int32)


def layout_of(size: tuple[int, int], rules: ImageRules) -> TokenLayout | None:
    """Return how the tokens of an image follow from its patches; None if each is its own patch, or a merged group."""
    return anyres_layout(size, canvas_of(size, rules), tile_side(rules)) if rules.variant == "anyres" else None


def canvas_of(size: tuple[int, int], rules: ImageRules) -> tuple[int, int]:
    """Return rows and columns of one image of `size` (width, height): of patches if native, of tiles if tiled."""
    rows, columns = _canvases(np.array([size]), rules)[0].tolist()
    return rows, columns


def tile_side(rules: ImageRules) -> int:
    """Return the number of patches per side of a tile: a multiple of `merge`."""
    return rules.tile // (rules.patch * rules.merge) * rules.merge


def _canvases(sizes: np.ndarray, rules: ImageRules) -> np.ndarray:
    sizes = np.asarray(sizes, dtype=np.int64).reshape(-1, 2)
    chosen = {"native": _native, "tiled": _tiled, "anyres": anyres_canvases}[rules.variant]
    return chosen(sizes, rules)


def _native(sizes: np.ndarray, rules: ImageRules) -> np.ndarray:
    """Return rows and columns of patches, rounded to groups of `merge` and within the pixel limits.

    The arithmetic is that of Qwen2-VL's processor, so the grids are identical.
    """
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
    """Return rows and columns of tiles: the layout whose aspect ratio is nearest to the image's.

    Of layouts with the same ratio, the larger one is taken if the image has at least half as many pixels.
    """
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
