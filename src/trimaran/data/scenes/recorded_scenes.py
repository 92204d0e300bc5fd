"""Recorded scenes of a perception model: a folder with an index, images, LiDAR and radar points, and ground truth.

The layout is described in `docs/guides/data.md`. Runs in loader processes: does not import torch.
"""

import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from trimaran.core import UserError, check_regular_file, read_regular_text, templated
from trimaran.core.input_rules import (
    BOX_NUMBERS,
    CAMERA_METRES,
    GROUND,
    LIDAR_NUMBERS,
    OBJECTS,
    RADAR_NUMBERS,
    RIG_NUMBERS,
    SceneRules,
    Sensor,
)
from trimaran.data.quarantine import BadSampleError
from trimaran.data.scenes.simulated_scenes import RADARS, SimulatedScene
from trimaran.data.vision.decode import BadImageError, pixels_of

MAX_SENSOR_FILE_BYTES = 1 << 30
SENSOR_NAMES = {"cameras": "camera image", "lidar": "LiDAR points", "radar": "radar points"}
INDEX, FORMAT = "scenes.json", "trimaran-scenes-1"
MAX_INDEX_BYTES = 1 << 30
FORWARD_FIX = "see docs/guides/data.md for the layout of recorded scenes"
MAX_DISTORTION = 0.02


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
            raise UserError(
                "D015.scene-no-file", where=str(error), sensor_names=SENSOR_NAMES[sensor], sensor=sensor
            ) from None


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


def file_inside(folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise BadSampleError(f"{name[:120]!r} leaves the folder")
    return path


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


def flat_pose(x: float, y: float, z: float, heading: float) -> np.ndarray:
    """Return the homogeneous matrix of a place and a heading, without any tilt."""
    cos, sin = np.cos(heading), np.sin(heading)
    return np.array([[cos, -sin, 0, x], [sin, cos, 0, y], [0, 0, 1, z], [0, 0, 0, 1]])


@dataclass(frozen=True, slots=True)
class RecordedScenes:
    """The scenes of a folder, in the order of its index. `radars` are the poses [4, 4] of the radars on the vehicle.

    `rig` f32 [cameras, RIG_NUMBERS] is for the model's images. `digest` identifies the scenes.
    """

    folder: Path
    rules: SceneRules
    options: SceneOptions
    rig: np.ndarray | None
    radars: tuple[np.ndarray, ...]
    entries: tuple[Mapping[str, Any], ...]
    digest: str

    def __len__(self) -> int:
        return len(self.entries)

    def scene(self, number: int) -> SimulatedScene:
        """Return a scene. Raises BadSampleError if a file is wrong, UserError if one is missing that may not be."""
        entry, rules = self.entries[number], self.rules
        try:
            cameras = black_image(rules)[None][:0]
            if rules.cameras:
                names = _list(entry, "cameras", rules.cameras)
                cameras = np.stack(
                    [
                        self.options.read_or(
                            black_image(rules), "cameras", lambda each=each: read_camera(self._file(each), rules)
                        )
                        for each in names
                    ]
                )
            ground = self._array(entry.get("ground"), (rules.cells, rules.cells))
            if ground.min() < 0 or ground.max() >= len(GROUND):
                raise BadSampleError(f"its ground has classes outside 0 to {len(GROUND) - 1}")
            points, radar, boxes = self._points(entry), self._radar(number), _boxes(entry, rules)
        except (BadSampleError, MissingFileError) as error:
            raise BadSampleError(f"scene {number} of {self.folder}: {error}") from None
        return SimulatedScene(cameras, points, boxes, ground.astype(np.int64), radar)

    def num_points(self, number: int) -> tuple[int, int]:
        """Return the LiDAR and radar points of a scene inside the grid."""
        return len(self._points(self.entries[number])), len(self._radar(number))

    def _points(self, entry: Mapping[str, Any]) -> np.ndarray:
        """Return the LiDAR points inside the grid: x, y, z in metres from the vehicle, and intensity."""
        points, shape = no_points("lidar"), (-1, LIDAR_NUMBERS)
        if self.rules.lidar:
            read = partial(self._array, entry.get("lidar"), shape, required="lidar")
            points = self.options.read_or(points, "lidar", read)
        return inside_grid(points, self.rules, "LiDAR points")

    def _radar(self, number: int) -> np.ndarray:
        """Return the radar points of the newest sweeps of each radar, inside the grid."""
        parts = [no_points("radar")]
        for sweep in self._sweeps(number) if self.rules.radar else ():
            parts.append(self.options.read_or(parts[0], "radar", lambda sweep=sweep: self._sweep(sweep)))
        return inside_grid(np.concatenate(parts), self.rules, "radar points")

    def _sweeps(self, number: int) -> list[Mapping[str, Any]]:
        """Return the newest sweeps of each radar. A scene that names none has no radar."""
        entry = self.entries[number]
        if entry.get("radar") is None:
            return [{"file": None, "scene": number}]
        by_radar: dict[int, list[Mapping[str, Any]]] = {}
        for sweep in _list(entry, "radar"):
            try:
                age, radar = float(sweep.get("age", 0.0)), int(sweep["radar"])
            except (KeyError, TypeError, ValueError, AttributeError):
                raise BadSampleError("a radar sweep lacks radar, file or age") from None
            if not 0 <= radar < len(self.radars) or not 0 <= age < math.inf:
                raise BadSampleError(f"a sweep of radar {radar}, {age} s old, is not one of {len(self.radars)} radars")
            by_radar.setdefault(radar, []).append({**sweep, "age": age, "radar": radar})
        newest = [sorted(sweeps, key=lambda each: each["age"]) for sweeps in by_radar.values()]
        return [sweep for sweeps in newest for sweep in sweeps[: self.options.radar_sweeps]]

    def _sweep(self, sweep: Mapping[str, Any]) -> np.ndarray:
        if sweep["file"] is None:
            raise MissingFileError(f"{self.folder / INDEX}, scene {sweep['scene']}: it names no radar")
        points = self._array(sweep["file"], (-1, RADAR_NUMBERS - 1), required="radar").astype(np.float64)
        try:
            x, y, heading = (float(each) for each in sweep.get("pose", (0.0, 0.0, 0.0)))
        except (TypeError, ValueError):
            raise BadSampleError("the pose of a radar sweep is not [x, y, heading]") from None
        return swept_points(points, flat_pose(x, y, 0.0, heading) @ self.radars[sweep["radar"]], sweep["age"])

    def _array(self, name: Any, shape: tuple[int, ...], *, required: Sensor | None = None) -> np.ndarray:
        if name is None and required:
            raise MissingFileError(f"{self.folder / INDEX}: a scene names no {required}")
        try:
            array = np.load(io.BytesIO(read_sensor_file(self._file(name))), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise BadSampleError(f"{name}: {error}") from None
        fits = isinstance(array, np.ndarray) and array.ndim == len(shape) and array.dtype.kind in "iuf"
        if not fits or any(want not in (-1, have) for want, have in zip(shape, array.shape, strict=True)):
            raise BadSampleError(f"{name}: it has not the shape {list(shape)}")
        return array

    def _file(self, name: Any) -> Path:
        if not isinstance(name, str) or not name:
            raise BadSampleError(f"{name!r} is not the name of a file")
        return file_inside(self.folder, name)


def open_index(folder: Path, rules: SceneRules, options: SceneOptions) -> RecordedScenes:
    """Return the scenes of the index in `folder`. Raises UserError if it does not fit the model."""
    where = str(folder / INDEX)
    try:
        check_regular_file(folder / INDEX)
        if (folder / INDEX).stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(templated("it is larger than {max_index_bytes:,} bytes", max_index_bytes=MAX_INDEX_BYTES))
        text = read_regular_text(folder / INDEX)
        tree = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(f"the index of recorded scenes cannot be read: {error}", where) from None
    if not isinstance(tree, Mapping) or tree.get("format") != FORMAT:
        raise _wrong(f"the index is not of the format {FORMAT}", where)
    scenes = tree.get("scenes")
    if not isinstance(scenes, list) or not scenes or not all(isinstance(each, Mapping) for each in scenes):
        raise _wrong("the index lists no scenes", where)
    digest = hashlib.sha256(text.encode()).hexdigest()
    rig = None
    if rules.cameras:
        cameras = tree.get("cameras")
        if not isinstance(cameras, list) or len(cameras) != rules.cameras:
            found = len(cameras) if isinstance(cameras, list) else "no"
            raise _wrong(f"the index has {found} cameras, and the model {rules.cameras}", where)
        rig = np.zeros((rules.cameras, RIG_NUMBERS), dtype=np.float32)
        for number, camera in enumerate(cameras):
            try:
                wide, tall = (float(camera[name]) for name in ("width", "height"))
                column, row = (float(each) for each in camera["centre"])
                values = (float(camera["heading"]), float(camera["focal"]), float(camera.get("metres", CAMERA_METRES)))
                x, y = (float(each) for each in camera.get("position", (0.0, 0.0)))
            except (KeyError, TypeError, ValueError, AttributeError):
                raise _wrong(f"camera {number} lacks heading, focal, centre, width or height", where) from None
            heading, focal, metres = values
            if not all(map(math.isfinite, (*values, column, row, x, y))) or min(wide, tall, focal, metres) <= 0:
                raise _wrong(f"camera {number} has an impossible calibration", where)
            across, down = camera_scale(f"camera {number}", (wide, tall), rules, where)
            rig[number] = heading, focal * across, column * across, row * down, metres, x, y
    radars = tree.get("radars", []) if rules.radar else []
    if not isinstance(radars, list):
        raise _wrong("the radars of the index are not a list", where)
    poses = []
    for number, radar in enumerate(radars):
        try:
            place = [*map(float, radar["position"]), float(radar["heading"])]
        except (KeyError, TypeError, ValueError):
            raise _wrong(f"radar {number} lacks position or heading", where) from None
        if len(place) != 4 or not all(map(math.isfinite, place)):
            raise _wrong(f"radar {number} has an impossible calibration", where)
        poses.append(flat_pose(*place))
    return RecordedScenes(folder, rules, options, rig, tuple(poses), tuple(scenes), digest)


def write_scenes(scenes: Sequence[SimulatedScene], rules: SceneRules, folder: Path) -> None:
    """Write scenes as recorded ones: a small set of examples, for tests and to look at."""
    folder.mkdir(parents=True)
    camera = {"width": rules.width, "height": rules.height, "focal": rules.focal,
              "centre": [rules.width / 2, rules.horizon], "metres": CAMERA_METRES}  # fmt: skip
    entries = []
    for number, scene in enumerate(scenes):
        names = [f"{number:06d}-{each}.png" for each in range(rules.cameras)]
        for name, pixels in zip(names, scene.cameras, strict=True):
            Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(folder / name)
        np.save(folder / f"{number:06d}-lidar.npy", scene.points)
        np.save(folder / f"{number:06d}-ground.npy", scene.segmentation.astype(np.uint8))
        entry = {"lidar": f"{number:06d}-lidar.npy", "ground": f"{number:06d}-ground.npy"}
        sweeps = []
        for age in np.unique(scene.radar[:, 6]) if rules.radar else ():
            taken = scene.radar[scene.radar[:, 6] == age]
            for radar, mount in enumerate(RADARS):
                name = f"{number:06d}-radar-{radar}-{1000 * age:03.0f}.npy"
                to_radar = np.linalg.inv(flat_pose(mount.x, mount.y, mount.metres, mount.heading))
                part = taken[radar :: len(RADARS)].astype(np.float64)
                np.save(folder / name, swept_points(part[:, :6], to_radar, 0.0)[:, :6])
                sweeps.append({"radar": radar, "file": name, "age": float(age)})
        entry |= {"radar": sweeps} if rules.radar else {}
        boxes = [
            {"centre": box[:3], "size": box[3:6], "yaw": box[6], "class": OBJECTS[int(box[7])]}
            for box in scene.boxes.tolist()
        ]
        entries.append({"cameras": names, **entry, "boxes": boxes})
    cameras = [camera | {"heading": heading} for heading in rules.headings]
    radars = [{"position": [each.x, each.y, each.metres], "heading": each.heading} for each in RADARS]
    tree = {"format": FORMAT, "cameras": cameras, "scenes": entries} | ({"radars": radars} if rules.radar else {})
    (folder / INDEX).write_text(json.dumps(tree), encoding="utf-8")


def camera_scale(name: str, size: tuple[float, float], rules: SceneRules, where: str) -> tuple[float, float]:
    """Return by how much images of this width and height are scaled. Raises UserError if they would be distorted."""
    across, down = rules.width / size[0], rules.height / size[1]
    if abs(across / down - 1) > MAX_DISTORTION:
        raise _wrong(f"images of {name}, {size[0]:g} x {size[1]:g}, would be distorted to {rules.width} x "
                     f"{rules.height}", where)  # fmt: skip
    return across, down


def _boxes(entry: Mapping[str, Any], rules: SceneRules) -> np.ndarray:
    """Return the boxes whose centre is inside the grid."""
    boxes = []
    for box in _list(entry, "boxes"):
        try:
            numbers = [*map(float, box["centre"]), *map(float, box["size"]), float(box["yaw"])]
            kind = OBJECTS.index(box["class"])
        except (KeyError, TypeError, ValueError):
            raise BadSampleError(f"a box lacks centre, size, yaw or a class of {', '.join(OBJECTS)}") from None
        if len(numbers) != BOX_NUMBERS - 1 or not all(map(math.isfinite, numbers)) or min(numbers[3:6]) <= 0:
            raise BadSampleError("a box has impossible numbers")
        numbers[6] = (numbers[6] + math.pi / 2) % math.pi - math.pi / 2  # a box looks the same from both ends
        if max(abs(numbers[0]), abs(numbers[1])) < rules.reach:
            boxes.append([*numbers, kind])
    return np.array(boxes, dtype=np.float32).reshape(-1, BOX_NUMBERS)


def _list(entry: Mapping[str, Any], name: str, count: int | None = None) -> list[Any]:
    value = entry.get(name)
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise BadSampleError(f"'{name}' is not a list{f' of {count}' if count else ''}")
    return value


def _wrong(what: str, where: str) -> UserError:
    return UserError("T066", what, where=where, fix=FORWARD_FIX)
