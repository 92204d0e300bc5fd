"""The JSON tables of nuScenes, with only the fields that training needs.

The largest table has 2.6 million records, so each record is reduced as soon as it is parsed.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL.PngImagePlugin import PngImageFile

from trimaran.core import UserError, check_regular_file, read_regular_text, templated
from trimaran.data.quarantine import BadSampleError
from trimaran.data.scenes.recorded_scenes import read_sensor_file

MAX_TABLE_BYTES = 8 << 30
MODALITIES = {"camera": "cameras", "lidar": "lidar", "radar": "radar"}  # of nuScenes, and the sensors of a model
TABLES = (
    "sample", "sample_data", "calibrated_sensor", "ego_pose", "sample_annotation", "category", "instance", "sensor",
    "log", "scene",
)  # fmt: skip
LIDAR_FIELDS = 5  # x, y, z, intensity from 0 to 255, and the beam
MAX_INTENSITY = 255.0
MAX_RADAR_POINTS = 1_000_000
MAX_HEADER_LINES = 32
# Points that are kept, as by the defaults of nuScenes' own code: valid ones, all but stopped ones, unambiguous ones.
KEPT_STATES = {"invalid_state": (0,), "dyn_prop": tuple(range(7)), "ambig_state": (3,)}
RADAR_FIELDS = ("x", "y", "z", "rcs", "vx_comp", "vy_comp")
KINDS = {"F": "f", "I": "i", "U": "u"}
MAP_METRES = 0.1  # of a pixel
ON_MAP = 225  # pixels at least as bright are drivable
MAX_MAP_PIXELS = 1 << 30


class SensorRecording(NamedTuple):
    """One file of a sensor: a record of sample_data."""

    sample: str
    ego_pose: str
    calibration: str
    file: str
    microseconds: int
    is_key_frame: bool
    previous: str
    size: tuple[int, int]


class SensorCalibration(NamedTuple):
    """A sensor on the vehicle: its channel, its pose [4, 4], and the matrix of a camera [3, 3]."""

    channel: str
    modality: str
    pose: np.ndarray
    intrinsic: np.ndarray


class BoxAnnotation(NamedTuple):
    """A box in the world: its pose [4, 4], width, length, height, class of nuScenes, LiDAR and radar points in it."""

    pose: np.ndarray
    size: tuple[float, float, float]
    category: str
    num_points: int


class KeyFrame(NamedTuple):
    """A key frame: its token, the key frames of its sensors by channel, and the map of its place, if there is one."""

    token: str
    recordings: Mapping[str, str]
    map: str | None


@dataclass(frozen=True, slots=True)
class NuscenesTables:
    """The samples in the order of their scenes and times, and what they refer to, by token."""

    samples: tuple[KeyFrame, ...]
    recordings: Mapping[str, SensorRecording]
    calibrations: Mapping[str, SensorCalibration]
    ego_poses: Mapping[str, np.ndarray]
    annotations: Mapping[str, tuple[BoxAnnotation, ...]]


def read_tables(folder: Path, sensors: Collection[str], categories: Collection[str]) -> NuscenesTables:
    """Return the tables in `folder`, for the given sensors and categories of boxes. Raises UserError."""
    for table in TABLES:
        if not (folder / f"{table}.json").is_file():
            raise wrong_table(templated("the table {table}.json is missing", table=table), folder)
    try:
        return _tables(folder, sensors, categories)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise wrong_table(
            templated("a table refers to what is not there, or lacks a field: {error!r}", error=error), folder
        ) from None


def _tables(folder: Path, sensors: Collection[str], categories: Collection[str]) -> NuscenesTables:
    sensor_of = dict(_rows(folder, "sensor", lambda row: (row["token"], (row["channel"], row["modality"]))))

    def calibration(row: dict[str, Any]) -> tuple[str, SensorCalibration]:
        matrix = np.array(row["camera_intrinsic"] or np.eye(3), dtype=np.float64).reshape(3, 3)
        channel, modality = sensor_of[row["sensor_token"]]
        return row["token"], SensorCalibration(channel, modality, pose_of(row), matrix)

    calibrations: dict[str, SensorCalibration] = dict(_rows(folder, "calibrated_sensor", calibration))
    wanted = {token for token, each in calibrations.items() if MODALITIES.get(each.modality) in {*sensors, "lidar"}}

    def recording(row: dict[str, Any]) -> tuple[str, SensorRecording] | None:
        calibration = row["calibrated_sensor_token"]
        if calibration not in wanted or not (row["is_key_frame"] or calibrations[calibration].modality == "radar"):
            return None
        size = int(row.get("width") or 0), int(row.get("height") or 0)
        return row["token"], SensorRecording(row["sample_token"], row["ego_pose_token"], calibration, row["filename"],
                                       int(row["timestamp"]), row["is_key_frame"], row["prev"], size)  # fmt: skip

    recordings = dict(_rows(folder, "sample_data", recording))
    needed = {each.ego_pose for each in recordings.values()}
    ego_poses = dict(
        _rows(folder, "ego_pose", lambda row: (row["token"], pose_of(row)) if row["token"] in needed else None)
    )
    if missing := needed - set(ego_poses):
        raise ValueError(f"ego_pose {min(missing)}")
    samples = _samples(folder, recordings, calibrations)
    # The boxes of these categories, by sample.
    names = dict(_rows(folder, "category", lambda row: (row["token"], row["name"])))
    instances = dict(_rows(folder, "instance", lambda row: (row["token"], names[row["category_token"]])))

    def annotation(row: dict[str, Any]) -> tuple[str, BoxAnnotation] | None:
        category = instances[row["instance_token"]]
        if category not in categories:
            return None
        width, length, height = map(float, row["size"])
        points = int(row["num_lidar_pts"]) + int(row["num_radar_pts"])
        return row["sample_token"], BoxAnnotation(pose_of(row), (width, length, height), category, points)

    found: dict[str, list[BoxAnnotation]] = {}
    for sample, each in _rows(folder, "sample_annotation", annotation):
        found.setdefault(sample, []).append(each)
    return NuscenesTables(
        samples, recordings, calibrations, ego_poses, {sample: tuple(each) for sample, each in found.items()}
    )


def _samples(
    folder: Path, recordings: Mapping[str, SensorRecording], calibrations: Mapping[str, SensorCalibration]
) -> tuple[KeyFrame, ...]:
    """Return the samples, scene after scene, each in the order of time."""
    scenes = {token: (number, log) for number, (token, log) in enumerate(
        _rows(folder, "scene", lambda row: (row["token"], row["log_token"])))}  # fmt: skip
    logs = set(_rows(folder, "log", lambda row: row["token"]))
    by_sample: dict[str, dict[str, str]] = {}
    for token, each in recordings.items():
        if each.is_key_frame:
            by_sample.setdefault(each.sample, {})[calibrations[each.calibration].channel] = token
    has_map = (folder / "map.json").is_file()  # of each log: the drivable surface, as a mask; the table is optional
    files = _rows(folder, "map", lambda row: (row["filename"], row["log_tokens"])) if has_map else []
    maps = {log: file for file, logs in files if file for log in logs}
    rows = list(_rows(folder, "sample", lambda row: (row["scene_token"], int(row["timestamp"]), row["token"])))
    rows.sort(key=lambda row: (scenes[row[0]][0], row[1]))
    for scene, _, _ in rows:
        if scenes[scene][1] not in logs:
            raise ValueError(f"log {scenes[scene][1]}")
    return tuple(KeyFrame(token, by_sample.get(token, {}), maps.get(scenes[scene][1])) for scene, _, token in rows)


def pose_of(row: Mapping[str, Any]) -> np.ndarray:
    """Return the homogeneous matrix of a translation and a rotation, which is a quaternion w, x, y, z."""
    w, x, y, z = np.array(row["rotation"], dtype=np.float64) / np.linalg.norm(row["rotation"])
    pose = np.eye(4)
    pose[:3, :3] = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    pose[:3, 3] = row["translation"]
    if not np.isfinite(pose).all():
        raise ValueError("a rotation or translation is not finite")
    return pose


def _rows(folder: Path, table: str, reduce: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """Return what `reduce` makes of each record of a table; None leaves the record out."""
    path = folder / f"{table}.json"
    try:
        check_regular_file(path)
        if path.stat().st_size > MAX_TABLE_BYTES:
            raise ValueError(templated("it is larger than {max_table_bytes:,} bytes", max_table_bytes=MAX_TABLE_BYTES))
        rows = json.loads(read_regular_text(path), object_hook=lambda row: reduce(row) if "token" in row else row)
    except (OSError, json.JSONDecodeError, RecursionError) as error:
        raise wrong_table(templated("the table cannot be read: {error}", error=error), path) from None
    if not isinstance(rows, list):
        raise wrong_table("the table is not a list of records", path)
    return [row for row in rows if row is not None]


def wrong_table(what: str, path: Path) -> UserError:
    fix = "compare the folder with nuScenes' v1.0 layout, and copy it again"
    return UserError("D016", what, where=str(path), fix=fix)


def read_lidar(path: Path) -> np.ndarray:
    """Return the points [P, 4] of a .pcd.bin file: x, y, z, and intensity from 0 to 1, in the LiDAR's coordinates."""
    content = read_sensor_file(path)
    if len(content) % (4 * LIDAR_FIELDS):
        raise BadSampleError(f"{path}: {len(content)} bytes are not points of {LIDAR_FIELDS} float32")
    points = np.frombuffer(content, dtype="<f4").reshape(-1, LIDAR_FIELDS)[:, :4].astype(np.float64)
    points[:, 3] /= MAX_INTENSITY
    return points


def read_radar(path: Path) -> np.ndarray:
    """Return the kept points [R, 6] of a .pcd file: x, y, z, cross-section and compensated velocity (vx, vy).

    They are in the radar's coordinates. A file whose first point is not a number holds no points.
    """
    content = read_sensor_file(path)
    header, body = _header(content, path)
    try:
        names, kinds = header["FIELDS"], zip(header["TYPE"], header["SIZE"], strict=True)
        dtype = np.dtype([(name, f"<{KINDS[kind]}{size}") for name, (kind, size) in zip(names, kinds, strict=True)])
        count = int(header["WIDTH"][0]) * int(header["HEIGHT"][0])
        if header["DATA"] != ["binary"] or any(each != "1" for each in header["COUNT"]):
            raise ValueError("DATA is not binary, or a field has several values")
        if not 0 <= count <= MAX_RADAR_POINTS or len(body) < count * dtype.itemsize:
            raise ValueError(f"it holds {len(body)} bytes instead of {count} points of {dtype.itemsize}")
        rows = np.frombuffer(body, dtype=dtype, count=count)
        points = np.stack([rows[name].astype(np.float64) for name in RADAR_FIELDS], axis=1)
        keep = np.logical_and.reduce([np.isin(rows[name], states) for name, states in KEPT_STATES.items()])
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise BadSampleError(f"{path}: it is not a radar file of nuScenes: {error}") from None
    return points[keep] if not count or np.isfinite(points[0]).all() else points[:0]


def _header(content: bytes, path: Path) -> tuple[dict[str, list[str]], bytes]:
    """Return the words of each line of a .pcd header, by the first of them, and the bytes after it."""
    header: dict[str, list[str]] = {}
    start = 0
    for _ in range(MAX_HEADER_LINES):
        end = content.find(b"\n", start)
        if end < 0:
            break
        name, *words = content[start:end].decode("ascii", "replace").split() or [""]
        header[name], start = words, end + 1
        if name == "DATA":
            return header, content[start:]
    raise BadSampleError(f"{path}: it has no .pcd header")


class DrivableMap:
    """A mask of the drivable surface, packed to one bit a pixel: a city has some 10^8 of them."""

    def __init__(self, path: Path) -> None:
        with PngImageFile(path) as image:  # Pillow's own limit of `Image.open` is below the size of a city
            if image.width * image.height > MAX_MAP_PIXELS:
                raise BadSampleError(f"{path}: it has more than {MAX_MAP_PIXELS:,} pixels")
            self._size = image.width, image.height
            self._rows = np.packbits(np.asarray(image.convert("L")) >= ON_MAP, axis=1)

    def contains(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return whether the places, in metres in the world, are drivable. Outside the mask nothing is."""
        (wide, tall), column = self._size, np.floor(x / MAP_METRES).astype(np.int64)
        row = tall - 1 - np.floor(y / MAP_METRES).astype(np.int64)  # y points up, rows go down
        known = (column >= 0) & (column < wide) & (row >= 0) & (row < tall)
        column, row = np.where(known, column, 0), np.where(known, row, 0)
        return known & ((self._rows[row, column >> 3] >> (7 - (column & 7))) & 1).astype(bool)


@lru_cache(maxsize=8)
def open_map(path: Path) -> DrivableMap:
    """Return the map in a PNG file. Forked loader processes share it once it is read."""
    read_sensor_file(path)
    try:
        return DrivableMap(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise BadSampleError(f"{path}: {error}") from None
