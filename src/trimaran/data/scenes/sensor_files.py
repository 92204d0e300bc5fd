"""Files of recorded sensors: what happens when one is missing, and points in the coordinates of the vehicle."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimaran.core import UserError
from trimaran.core.input_rules import LIDAR_NUMBERS, RADAR_NUMBERS, SceneRules, Sensor
from trimaran.data.quarantine import BadSampleError
from trimaran.data.vision.decode import BadImageError, pixels_of

MAX_SENSOR_FILE_BYTES = 1 << 30


class MissingFileError(Exception):
    """A scene has no such file. The message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneOptions:
    """How recorded scenes are read: sensors that a scene may lack, and how many newest sweeps of each radar it has."""

    optional: tuple[Sensor, ...] = ()
    radar_sweeps: int = 6
    version: str | None = None

    def read_or(self, empty: np.ndarray, sensor: Sensor, read: Callable[[], np.ndarray]) -> np.ndarray:
        """Return what `read` returns; `empty` if its file is missing and the sensor is optional."""
        try:
            return read()
        except MissingFileError as error:
            if sensor in self.optional:
                return empty
            raise UserError("D015", f"a scene has no {SENSOR_NAMES[sensor]}: a file is missing", where=str(error),
                            fix=f"restore the file, or set data.scenes.optional to [{sensor}]") from None  # fmt: skip


SENSOR_NAMES = {"cameras": "camera image", "lidar": "LiDAR points", "radar": "radar points"}


def read_sensor_file(path: Path) -> bytes:
    """Return the content of a file. Raises MissingFileError or BadSampleError."""
    try:
        if path.stat().st_size > MAX_SENSOR_FILE_BYTES:
            raise BadSampleError(f"{path}: it is larger than {MAX_SENSOR_FILE_BYTES:,} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        raise MissingFileError(str(path)) from None
    except OSError as error:
        raise BadSampleError(f"{path}: {error}") from None


def read_camera(path: Path, rules: SceneRules) -> np.ndarray:
    """Return an image file as u8 [3, height, width], in the size of the model."""
    content = read_sensor_file(path)
    try:
        (pixels,) = pixels_of(content, [(rules.width, rules.height)])
    except BadImageError as error:
        raise BadSampleError(f"{path}: {error}") from None
    return pixels.transpose(2, 0, 1)


def black_image(rules: SceneRules) -> np.ndarray:
    return np.zeros((3, rules.height, rules.width), dtype=np.uint8)


def no_points(sensor: Sensor) -> np.ndarray:
    return np.zeros((0, RADAR_NUMBERS if sensor == "radar" else LIDAR_NUMBERS), dtype=np.float32)


def moved_points(points: np.ndarray, pose: np.ndarray) -> np.ndarray:
    """Return points [P, 3 or more] with x, y, z mapped by the homogeneous matrix `pose` [4, 4]."""
    moved = points.copy()
    moved[:, :3] = points[:, :3] @ pose[:3, :3].T + pose[:3, 3]
    return moved


def swept_points(points: np.ndarray, pose: np.ndarray, age: float) -> np.ndarray:
    """Return radar points [R, RADAR_NUMBERS] in the coordinates of the vehicle, with the age of their sweep.

    `points` [R, 6] are x, y, z, cross-section and the velocity (vx, vy), in the coordinates of the radar; `pose` maps
    these to the vehicle's. The velocity is that of the object over ground, so it is turned and not moved.
    """
    moved = moved_points(points, pose)
    flat = np.concatenate([points[:, 4:6], np.zeros((len(points), 1), dtype=points.dtype)], axis=1)
    moved[:, 4:6] = (flat @ pose[:3, :3].T)[:, :2]
    return np.concatenate([moved, np.full((len(points), 1), age, dtype=moved.dtype)], axis=1).astype(np.float32)


def inside_grid(points: np.ndarray, rules: SceneRules, name: str) -> np.ndarray:
    """Return the points inside the grid as fp32. Raises BadSampleError if one is not finite."""
    points = points.astype(np.float32)
    if not np.isfinite(points).all():
        raise BadSampleError(f"its {name} are not all finite")
    return points[(np.abs(points[:, :2]) < rules.reach).all(axis=1)]


def joined(parts: Sequence[np.ndarray], sensor: Sensor) -> np.ndarray:
    """Return the points of several sweeps together."""
    return np.concatenate([no_points(sensor), *parts])


def flat_pose(x: float, y: float, z: float, heading: float) -> np.ndarray:
    """Return the homogeneous matrix of a place and a heading, without any tilt."""
    cos, sin = np.cos(heading), np.sin(heading)
    return np.array([[cos, -sin, 0, x], [sin, cos, 0, y], [0, 0, 1, z], [0, 0, 0, 1]])
