"""How a perception model sees a scene: what the data has to know of its sensors, and nothing else of it."""

import math
from dataclasses import dataclass

OBJECTS = ("car", "taxi", "truck", "pedestrian")
"""Classes of boxes, by number. A taxi is a car but for its colour, which a camera sees and LiDAR does not."""

GROUND = ("terrain", "road", "object")
"""Classes of the cells of the ground seen from above, by number."""

CAMERA_METRES = 1.6  # above the ground
BOX_NUMBERS = 8  # x, y, z of the centre, length, width, height, yaw, class


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneRules:
    """A vehicle at the origin, looking along x; y points to its left and z up.

    Its `cameras`, of `height` x `width` pixels, look all around without a gap: number k is turned by k parts of the
    circle, to the left, and none is tilted. What is around, up to `reach` metres to each side, is a square of
    `cells` x `cells`, by x and then by y.
    """

    cameras: int
    height: int
    width: int
    cells: int
    reach: float

    @property
    def cell(self) -> float:
        """Metres of a cell's side."""
        return 2 * self.reach / self.cells

    @property
    def focal(self) -> float:
        """The focal length in pixels: as many cameras as there are close the circle."""
        return self.width / 2 / math.tan(math.pi / self.cameras)

    @property
    def horizon(self) -> float:
        """The row of pixels at which a camera looks straight ahead: above the middle, for the ground is below."""
        return 0.375 * self.height

    @property
    def headings(self) -> tuple[float, ...]:
        """Where each camera looks, in radians from x to y."""
        return tuple(2 * math.pi * number / self.cameras for number in range(self.cameras))
