"""How a model takes images: what the data has to know of its vision tower, and nothing else of it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """From pixels to patches, and from patches to tokens.

    An image is resized to a grid of patches of `patch` pixels a side, rows and columns both multiples of `merge`;
    `merge` x `merge` patches become one token of the language, written as `image_token` in the text. `native` keeps the
    shape of an image between `min_pixels` and `max_pixels`; `tiled` cuts it into 1 to `max_tiles` squares of `tile`
    pixels, and a small whole before them when there are several. `before` and `after` stand around each image.
    `positions` says what tells tokens where they are: their number, or time, row and column (Qwen2-VL).
    """

    patch: int
    merge: int
    image_token: int
    variant: Literal["native", "tiled"] = "native"
    tile: int = 448
    max_tiles: int = 12
    min_pixels: int = 56 * 56
    max_pixels: int = 1280 * 28 * 28
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    positions: Literal["line", "grid"] = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """What a row of a batch costs, in units of a language token without its attention.

    A sample of n tokens costs n + `token_pair` * n * n, and an image of p patches `patch` * p + `patch_pair` * p * p.
    """

    token_pair: float = 0.0
    patch: float = 0.0
    patch_pair: float = 0.0
