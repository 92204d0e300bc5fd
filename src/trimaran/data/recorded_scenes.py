"""Recorded scenes of a perception model: a folder with an index, camera images, LiDAR points and ground truth.

The layout is described in `docs/guides/data.md`. Runs in loader processes: does not import torch.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from trimaran.core import UserError
from trimaran.core.regular_files import check_regular_file, read_regular_text
from trimaran.core.scene_rules import BOX_NUMBERS, CAMERA_METRES, GROUND, OBJECTS, RIG_NUMBERS, SceneRules
from trimaran.data.quarantine import BadSampleError
from trimaran.data.simulated_scenes import SimulatedScene
from trimaran.data.vision.decode import BadImageError, pixels_of

INDEX, FORMAT = "scenes.json", "trimaran-scenes-1"
MAX_INDEX_BYTES = 1 << 30
MAX_FILE_BYTES = 1 << 30
MAX_POINTS = 10_000_000
FORWARD_FIX = "see docs/guides/data.md for the layout of recorded scenes"


@dataclass(frozen=True, slots=True)
class RecordedScenes:
    """The scenes of a folder, in the order of its index. `rig` f32 [cameras, RIG_NUMBERS] is for the model's images."""

    folder: Path
    rules: SceneRules
    rig: np.ndarray
    entries: tuple[Mapping[str, Any], ...]
    digest: str

    def __len__(self) -> int:
        return len(self.entries)

    def scene(self, number: int) -> SimulatedScene:
        """Return a scene. Raises BadSampleError with the reason if a file is missing or wrong."""
        entry = self.entries[number]
        try:
            cameras = np.stack([self._image(each) for each in _list(entry, "cameras", self.rules.cameras)])
            ground = self._array(entry.get("ground"), (self.rules.cells, self.rules.cells))
            if ground.min() < 0 or ground.max() >= len(GROUND):
                raise BadSampleError(f"its ground has classes outside 0 to {len(GROUND) - 1}")
            points, boxes = self._points(entry), _boxes(entry, self.rules)
        except BadSampleError as error:
            raise BadSampleError(f"scene {number} of {self.folder}: {error}") from None
        return SimulatedScene(cameras, points, boxes, ground.astype(np.int64))

    def _points(self, entry: Mapping[str, Any]) -> np.ndarray:
        """Return the LiDAR points inside the grid: x, y, z in metres from the vehicle, and intensity."""
        points = self._array(entry.get("lidar"), (-1, 4)).astype(np.float32)
        if not np.isfinite(points).all():
            raise BadSampleError("its LiDAR points are not all finite")
        return points[(np.abs(points[:, :2]) < self.rules.reach).all(axis=1)]

    def _image(self, name: Any) -> np.ndarray:
        try:
            (pixels,) = pixels_of(self._file(name).read_bytes(), [(self.rules.width, self.rules.height)])
        except (OSError, BadImageError) as error:
            raise BadSampleError(f"{name}: {error}") from None
        return pixels.transpose(2, 0, 1)

    def _array(self, name: Any, shape: tuple[int, ...]) -> np.ndarray:
        try:
            array = np.load(self._file(name), allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise BadSampleError(f"{name}: {error}") from None
        fits = isinstance(array, np.ndarray) and array.ndim == len(shape) and array.dtype.kind in "iuf"
        if not fits or any(want not in (-1, have) for want, have in zip(shape, array.shape, strict=True)):
            raise BadSampleError(f"{name}: it has not the shape {list(shape)}")
        return array

    def _file(self, name: Any) -> Path:
        if not isinstance(name, str) or not name:
            raise BadSampleError(f"{name!r} is not the name of a file")
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder.resolve()):
            raise BadSampleError(f"{name[:120]!r} leaves the folder")
        if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            raise BadSampleError(f"{name}: it is larger than {MAX_FILE_BYTES:,} bytes")
        return path


def open_scenes(path: str, rules: SceneRules) -> RecordedScenes:
    """Return the scenes in the folder `path`. Raises UserError if its index does not fit the model."""
    folder = Path(path).expanduser().absolute()
    where = str(folder / INDEX)
    try:
        check_regular_file(folder / INDEX)
        if (folder / INDEX).stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"it is larger than {MAX_INDEX_BYTES:,} bytes")
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
    return RecordedScenes(folder, rules, _rig(tree.get("cameras"), rules, where), tuple(scenes), digest)


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
        entries.append({"cameras": names, **entry, "boxes": [_box_fields(each) for each in scene.boxes.tolist()]})
    cameras = [camera | {"heading": heading} for heading in rules.headings]
    tree = {"format": FORMAT, "cameras": cameras, "scenes": entries}
    (folder / INDEX).write_text(json.dumps(tree), encoding="utf-8")


def _box_fields(box: list[float]) -> dict[str, Any]:
    return {"centre": box[:3], "size": box[3:6], "yaw": box[6], "class": OBJECTS[int(box[7])]}


def _rig(cameras: Any, rules: SceneRules, where: str) -> np.ndarray:
    """Return heading, focal length, centre column, centre row and metres of each camera, for the model's images."""
    if not isinstance(cameras, list) or len(cameras) != rules.cameras:
        found = len(cameras) if isinstance(cameras, list) else "no"
        raise _wrong(f"the index has {found} cameras, and the model {rules.cameras}", where)
    rig = np.zeros((rules.cameras, RIG_NUMBERS), dtype=np.float32)
    for number, camera in enumerate(cameras):
        try:
            wide, tall = (float(camera[name]) for name in ("width", "height"))
            column, row = (float(each) for each in camera["centre"])
            values = (float(camera["heading"]), float(camera["focal"]), float(camera.get("metres", CAMERA_METRES)))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _wrong(f"camera {number} lacks heading, focal, centre, width or height", where) from None
        heading, focal, metres = values
        if not all(map(math.isfinite, (*values, column, row))) or min(wide, tall, focal, metres) <= 0:
            raise _wrong(f"camera {number} has an impossible calibration", where)
        across, down = rules.width / wide, rules.height / tall
        if abs(across / down - 1) > MAX_DISTORTION:
            raise _wrong(f"images of camera {number}, {wide:g} x {tall:g}, would be distorted to {rules.width} x "
                         f"{rules.height}", where)  # fmt: skip
        rig[number] = heading, focal * across, column * across, row * down, metres
    return rig


MAX_DISTORTION = 0.02


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
