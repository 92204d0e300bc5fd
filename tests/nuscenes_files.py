"""Writes a tiny data set in the exact layout of nuScenes v1.0: JSON tables, .pcd.bin, .pcd and .jpg files."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

VERSION = "v1.0-mini"
CAMERA_YAWS = {
    "CAM_FRONT": 0.0, "CAM_FRONT_LEFT": 55.0, "CAM_BACK_LEFT": 110.0, "CAM_BACK": 180.0, "CAM_BACK_RIGHT": -110.0,
    "CAM_FRONT_RIGHT": -55.0,
}  # fmt: skip
RADAR_YAWS = {
    "RADAR_FRONT": 0.0, "RADAR_FRONT_LEFT": 90.0, "RADAR_FRONT_RIGHT": -90.0, "RADAR_BACK_LEFT": 180.0,
    "RADAR_BACK_RIGHT": 180.0,
}  # fmt: skip
WIDTH, HEIGHT, FOCAL = 64, 32, 50.0
START, FRAME, SWEEP = 1_500_000_000_000_000, 500_000, 75_000  # microseconds
EGO_YAW, EGO_SPEED = 0.5, 4.0  # radians; metres a second along x of the world
RADAR_HEADER = """# .PCD v0.7 - Point Cloud Data file format
VERSION 0.7
FIELDS x y z dyn_prop id rcs vx vy vx_comp vy_comp is_quality_valid ambig_state x_rms y_rms invalid_state pdh0 vx_rms vy_rms
SIZE 4 4 4 1 2 4 4 4 4 4 1 1 1 1 1 1 1 1
TYPE F F F I I F F F F F I I I I I I I I
COUNT 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1
WIDTH {count}
HEIGHT 1
VIEWPOINT 0 0 0 1 0 0 0
POINTS {count}
DATA binary
"""  # noqa: E501
RADAR_DTYPE = np.dtype([
    ("x", "<f4"), ("y", "<f4"), ("z", "<f4"), ("dyn_prop", "i1"), ("id", "<i2"), ("rcs", "<f4"), ("vx", "<f4"),
    ("vy", "<f4"), ("vx_comp", "<f4"), ("vy_comp", "<f4"), ("is_quality_valid", "i1"), ("ambig_state", "i1"),
    ("x_rms", "i1"), ("y_rms", "i1"), ("invalid_state", "i1"), ("pdh0", "i1"), ("vx_rms", "i1"), ("vy_rms", "i1"),
])  # fmt: skip


def turn(yaw: float) -> list[float]:
    """Return the quaternion w, x, y, z of a turn about z."""
    return [math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)]


def product(a: Sequence[float], b: Sequence[float]) -> list[float]:
    (w, *u), (s, *v) = a, b
    vector = w * np.array(v) + s * np.array(u) + np.cross(u, v)
    return [float(w * s - np.dot(u, v)), *vector.tolist()]


def write_radar(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a radar file; points are valid, moving and unambiguous unless a row says otherwise."""
    points = np.zeros(len(rows), dtype=RADAR_DTYPE)
    points["ambig_state"] = 3
    for number, row in enumerate(rows):
        for name, value in row.items():
            points[name][number] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(RADAR_HEADER.format(count=len(rows)).encode() + points.tobytes())


def write_nuscenes(root: Path, *, samples: int = 3, sweeps: int = 2, with_map: bool = True) -> None:
    """Write `samples` key frames of one scene, each with `sweeps` earlier sweeps of every radar.

    The vehicle is turned by EGO_YAW and drives along x of the world. A car stands 10 m ahead and 2 m left of the first
    key frame's vehicle; a cone, which is no target, beside it.
    """
    rng = np.random.default_rng(0)
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in (
        "sample", "sample_data", "calibrated_sensor", "ego_pose", "sample_annotation", "category", "instance", "sensor",
        "log", "scene", "attribute", "visibility",
    )}  # fmt: skip
    tables["log"] = [{"token": "log", "logfile": "n0", "vehicle": "n0", "date_captured": "2018-01-01",
                      "location": "singapore-onenorth"}]  # fmt: skip
    tables["scene"] = [{"token": "scene", "log_token": "log", "nbr_samples": samples, "first_sample_token": "s0",
                        "last_sample_token": f"s{samples - 1}", "name": "scene-0001", "description": ""}]  # fmt: skip
    for name in ("vehicle.car", "movable_object.trafficcone"):
        tables["category"].append({"token": f"c-{name}", "name": name, "description": ""})
        tables["instance"].append({"token": f"i-{name}", "category_token": f"c-{name}", "nbr_annotations": samples,
                                   "first_annotation_token": "", "last_annotation_token": ""})  # fmt: skip
    _write_calibrations(tables)
    for number in range(samples):
        when = START + number * FRAME
        tables["sample"].append({"token": f"s{number}", "timestamp": when, "scene_token": "scene",
                                 "prev": f"s{number - 1}" if number else "",
                                 "next": f"s{number + 1}" if number + 1 < samples else ""})  # fmt: skip
        _write_boxes(tables, number)
        _write_frame(root, tables, rng, number, when, sweeps)
    tables["sample"].reverse()  # tables are in no order
    folder = root / VERSION
    folder.mkdir(parents=True)
    if with_map:
        tables["map"] = [{"token": "m", "log_tokens": ["log"], "category": "semantic_prior", "filename": "maps/m.png"}]
        (root / "maps").mkdir()
        mask = np.zeros((2000, 3000), dtype=np.uint8)
        mask[2000 - 1000 :, :] = 255  # drivable below y = 100 m
        Image.fromarray(mask).save(root / "maps" / "m.png")
    for name, rows in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(rows, indent=0))


def ego_position(when: int) -> list[float]:
    return [100.0 + EGO_SPEED * (when - START) / 1e6, 95.0, 0.0]


def _write_calibrations(tables: dict[str, list[dict[str, Any]]]) -> None:
    to_camera = [0.5, -0.5, 0.5, -0.5]  # z ahead, x right, y down
    for modality, yaws in (("camera", CAMERA_YAWS), ("radar", RADAR_YAWS), ("lidar", {"LIDAR_TOP": -90.0})):
        for channel, degrees in yaws.items():
            yaw, camera = math.radians(degrees), modality == "camera"
            rotation = product(turn(yaw), to_camera) if camera else turn(yaw)
            place = {"camera": [1.7, 0.1, 1.5], "radar": [3.4, 0.5, 0.5], "lidar": [0.9, 0.0, 1.8]}[modality]
            matrix = [[FOCAL, 0.0, WIDTH / 2], [0.0, FOCAL, HEIGHT / 2], [0.0, 0.0, 1.0]] if camera else []
            tables["sensor"].append({"token": f"sensor-{channel}", "channel": channel, "modality": modality})
            tables["calibrated_sensor"].append({"token": f"cs-{channel}", "sensor_token": f"sensor-{channel}",
                                                "translation": place, "rotation": rotation,
                                                "camera_intrinsic": matrix})  # fmt: skip


def _write_boxes(tables: dict[str, list[dict[str, Any]]], number: int) -> None:
    cos, sin = math.cos(EGO_YAW), math.sin(EGO_YAW)
    x, y, _ = ego_position(START)
    for name, ahead in (("vehicle.car", 10.0), ("movable_object.trafficcone", 9.0)):
        tables["sample_annotation"].append({
            "token": f"a{number}-{name}", "sample_token": f"s{number}", "instance_token": f"i-{name}",
            "visibility_token": "4", "attribute_tokens": [], "prev": "", "next": "", "num_lidar_pts": 5,
            "num_radar_pts": 1, "translation": [x + ahead * cos - 2 * sin, y + ahead * sin + 2 * cos, 0.8],
            "size": [1.9, 4.5, 1.6], "rotation": turn(EGO_YAW + 0.2),
        })  # fmt: skip


def _write_frame(
    root: Path, tables: dict[str, list[dict[str, Any]]], rng: np.random.Generator, number: int, when: int, sweeps: int
) -> None:
    def record(channel: str, kind: str, time: int, key: bool, previous: str, size: tuple[int, int] = (0, 0)) -> str:
        token = f"{channel}-{time}"
        name = f"{'samples' if key else 'sweeps'}/{channel}/n0__{channel}__{time}.{kind}"
        tables["ego_pose"].append({"token": f"e-{token}", "timestamp": time, "rotation": turn(EGO_YAW),
                                   "translation": ego_position(time)})  # fmt: skip
        tables["sample_data"].append({
            "token": token, "sample_token": f"s{number}", "ego_pose_token": f"e-{token}",
            "calibrated_sensor_token": f"cs-{channel}", "timestamp": time, "fileformat": kind.split(".")[0],
            "is_key_frame": key, "height": size[1], "width": size[0], "filename": name, "prev": previous, "next": "",
        })  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        return name

    for channel in CAMERA_YAWS:
        name = record(channel, "jpg", when, True, "", (WIDTH, HEIGHT))
        Image.fromarray(rng.integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)).save(root / name)
    points = np.array([[0.0, 5.0, -1.0, 255.0, 3.0], [900.0, 0.0, 0.0, 10.0, 1.0]], dtype="<f4")
    (root / record("LIDAR_TOP", "pcd.bin", when, True, "")).write_bytes(points.tobytes())
    for channel in RADAR_YAWS:
        previous = ""
        for back in range(sweeps, -1, -1):
            time = when - back * SWEEP
            name = record(channel, "pcd", time, back == 0, previous)
            rows = [{"x": 4.0, "y": 1.0, "rcs": 7.5, "vx": 9.0, "vx_comp": 2.0, "vy_comp": 1.0, "dyn_prop": 6}]
            rows += [{"x": 5.0, "invalid_state": 4}, {"x": 5.0, "dyn_prop": 7}, {"x": 5.0, "ambig_state": 1}]
            write_radar(root / name, rows)
            previous = f"{channel}-{time}"
