"""How a model reads images: the part of its vision tower that the data pipeline needs."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """How pixels become patches, and patches become tokens.

    An image is resized to a grid of patches of `patch` pixels a side; rows and columns are multiples of `merge`.
    `merge` x `merge` patches become one language token, written as `image_token` in the text. `native` keeps the aspect
    ratio of an image between `min_pixels` and `max_pixels`. `tiled` splits it into 1 to `max_tiles` squares of `tile`
    pixels; if there are several, a `thumbnail` precedes or follows them. `anyres` (LLaVA-OneVision) is a thumbnail and
    a grid of tiles with padding, at most `max_tiles` in a square; the tokens of the padding are left out, and each row
    of the others ends with a newline. The tokens `before` and `after` surround each image.
    `positions` is the position encoding: the token's index, or time, row and column (Qwen2-VL). With several `frames`
    each patch holds the pixels of so many frames of a video; an image is repeated. A video is then several images after
    their times; if `time_positions` is not None, one block of images, whose positions advance by so many for each
    second of video, or by one for each image if it is 0.
    """

    patch: int
    merge: int
    image_token: int
    variant: Literal["native", "tiled", "anyres"] = "native"
    tile: int = 448
    max_tiles: int = 12
    thumbnail: Literal["none", "first", "last"] = "first"
    min_pixels: int = 56 * 56
    max_pixels: int = 1280 * 28 * 28
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    positions: Literal["line", "grid"] = "line"
    frames: int = 1
    time_positions: int | None = None

    def facts(self) -> dict[str, Any]:
        """Return what patches and packing depend on, for the names of caches: not `time_positions`."""
        return {name: value for name, value in asdict(self).items() if name != "time_positions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """What a row of the data holds on average, found in `num_samples` samples.

    Each patch attends to `image_patches` patches of its image or tile, and each token to those of its sample:
    `attended_tokens`, without a causal mask.
    """

    images: float
    patches: float
    image_patches: float
    attended_tokens: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """The cost of a row of a batch, in units of one language token without attention.

    A sample of n tokens costs n + `token_pair` * n * n, and an image of p patches `patch` * p + `patch_pair` * p * p.
    """

    token_pair: float = 0.0
    patch: float = 0.0
    patch_pair: float = 0.0
