"""The sensors of a perception model: the part of it that the data pipeline needs."""

import math
from dataclasses import dataclass

OBJECTS = ("car", "taxi", "truck", "pedestrian")
"""Classes of boxes, by index. A taxi differs from a car only in colour, which a camera sees and LiDAR does not."""

GROUND = ("terrain", "road", "object")
"""Classes of the cells of the bird's-eye view, by index."""

CAMERA_METRES = 1.6  # above the ground
RIG_NUMBERS = 5  # of a recorded camera: heading, focal length, centre column and row, metres above the ground
BOX_NUMBERS = 8  # x, y, z of the centre, length, width, height, yaw, class


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneRules:
    """A vehicle at the origin, facing along x; y points to its left and z up.

    Its `cameras`, of `height` x `width` pixels, cover the full circle: camera k is turned left by k / `cameras` of a
    turn, and none is tilted. The surroundings, up to `reach` metres to each side, are a grid of `cells` x `cells`,
    indexed by x and then y.
    """

    cameras: int
    height: int
    width: int
    cells: int
    reach: float

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
