"""The sensors of a perception model: the part of it that the data pipeline needs."""

import math
from dataclasses import dataclass, field
from typing import Literal

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
    """Points of a scene of the data inside the grid, on average, found in `num_scenes` scenes.

    With `own_rigs` the cameras of each scene have their own calibration, and so the scene its own attention bias.
    """

    lidar: float
    radar: float
    num_scenes: int
    own_rigs: bool = False
