"""How a model reads images and the sensors of a scene: the parts of it that the data pipeline needs."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

OBJECTS = ("car", "taxi", "truck", "pedestrian")
"""Classes of boxes, by index. A taxi differs from a car only in colour, which a camera sees and LiDAR does not."""

GROUND = ("terrain", "road", "object")
"""Classes of the cells of the bird's-eye view, by index."""

Sensor = Literal["cameras", "lidar", "radar"]
SENSORS: tuple[Sensor, ...] = ("cameras", "lidar", "radar")

CAMERA_METRES = 1.6  # above the ground
RIG_NUMBERS = 7  # of a recorded camera: heading, focal length, centre column and row, metres above the ground, x, y
BOX_NUMBERS = 8  # x, y, z of the centre, length, width, height, yaw, class
LIDAR_NUMBERS = 4  # of a point: x, y, z, intensity
RADAR_NUMBERS = 7  # of a point: x, y, z, radar cross-section in dBsm, radial velocity (vx, vy), age in seconds
UNKNOWN_GROUND = -100  # of a cell without ground truth


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneRules:
    """A vehicle at the origin, facing along x; y points to its left and z up.

    Its `cameras`, of `height` x `width` pixels, cover the full circle: camera k is turned left by k / `cameras` of a
    turn, and none is tilted. The surroundings, up to `reach` metres to each side, are a grid of `cells` x `cells`,
    indexed by x and then y. `lidar` and `radar` say whether the model has these sensors; `cameras` may be 0.
    """

    cameras: int
    height: int
    width: int
    cells: int
    reach: float
    # Not in the text of these rules, which identifies the scenes of older runs.
    lidar: bool = field(default=True, repr=False)
    radar: bool = field(default=False, repr=False)

    @property
    def sensors(self) -> tuple[Sensor, ...]:
        """The sensors that the model has."""
        held = {"cameras": self.cameras > 0, "lidar": self.lidar, "radar": self.radar}
        return tuple(sensor for sensor in SENSORS if held[sensor])

    @property
    def cell(self) -> float:
        """Side of a cell in metres."""
        return 2 * self.reach / self.cells

    @property
    def focal(self) -> float:
        """Focal length in pixels at which the cameras together cover the circle."""
        return self.width / 2 / math.tan(math.pi / self.cameras)

    @property
    def horizon(self) -> float:
        """The pixel row of the horizon: above the middle, so that more of the ground is visible."""
        return 0.375 * self.height

    @property
    def headings(self) -> tuple[float, ...]:
        """Heading of each camera, in radians from x to y."""
        return tuple(2 * math.pi * number / self.cameras for number in range(self.cameras))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenePoints:
    """Mean points of a scene of the data inside the grid, found in `num_scenes` scenes."""

    lidar: float
    radar: float
    num_scenes: int
    own_rigs: bool = False  # each scene has its own camera calibration, and so its own attention bias
