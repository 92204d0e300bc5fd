"""Scenes of nuScenes as samples of a perception model: read directly, in the coordinates of the vehicle."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimaran.core import (
    BOX_NUMBERS,
    GROUND,
    OBJECTS,
    RIG_NUMBERS,
    UNKNOWN_GROUND,
    SceneRules,
    Sensor,
    UserError,
    templated,
)
from trimaran.data.quarantine import BadSampleError
from trimaran.data.scenes.nuscenes_tables import (
    TABLES,
    KeyFrame,
    NuscenesTables,
    SensorRecording,
    open_map,
    read_lidar,
    read_radar,
    read_tables,
    wrong_table,
)
from trimaran.data.scenes.recorded_scenes import (
    MissingFileError,
    SceneOptions,
    black_image,
    camera_scale,
    file_inside,
    inside_grid,
    moved_points,
    no_points,
    read_camera,
    swept_points,
)
from trimaran.data.scenes.simulated_scenes import SimulatedScene, cell_centres, with_objects

LIDAR = "LIDAR_TOP"
# To the left, as the cameras of the rules.
CAMERAS = ("CAM_FRONT", "CAM_FRONT_LEFT", "CAM_BACK_LEFT", "CAM_BACK", "CAM_BACK_RIGHT", "CAM_FRONT_RIGHT")
RADAR_CHANNELS = ("RADAR_FRONT", "RADAR_FRONT_LEFT", "RADAR_FRONT_RIGHT", "RADAR_BACK_LEFT", "RADAR_BACK_RIGHT")

CATEGORIES = {
    "vehicle.car": "car",
    "vehicle.emergency.police": "car",
    "vehicle.truck": "truck",
    "vehicle.bus.bendy": "truck",
    "vehicle.bus.rigid": "truck",
    "vehicle.construction": "truck",
    "vehicle.trailer": "truck",
    "vehicle.emergency.ambulance": "truck",
    "human.pedestrian.adult": "pedestrian",
    "human.pedestrian.child": "pedestrian",
    "human.pedestrian.construction_worker": "pedestrian",
    "human.pedestrian.police_officer": "pedestrian",
}
"""The classes of the model. Other categories (cycles, barriers, cones, animals, ...) are no targets."""


@dataclass(frozen=True, slots=True)
class NuscenesScenes:
    """The samples of a folder in nuScenes' layout. The reference of a sample is the vehicle at its LiDAR key frame."""

    folder: Path
    rules: SceneRules
    options: SceneOptions
    tables: NuscenesTables
    digest: str
    rig: None = None  # each scene has its own calibration

    def __len__(self) -> int:
        return len(self.tables.samples)

    def scene(self, number: int) -> SimulatedScene:
        """Return a scene. Raises BadSampleError if a file is wrong, UserError if one is missing that may not be."""
        sample, rules = self.tables.samples[number], self.rules
        try:
            to_vehicle = np.linalg.inv(self._ego_pose(sample))
            boxes = self._boxes(sample, to_vehicle)
            cameras, rig = self._cameras(sample, to_vehicle)
            points, radar = self._lidar(sample), self._radar(sample, to_vehicle)
            cells = rules.cells
            ground = np.full((cells, cells), UNKNOWN_GROUND, dtype=np.int64)  # without a map, no cell is known
            if sample.map is not None:
                centres = cell_centres(rules).astype(np.float64)
                x, y = (each.ravel() for each in np.meshgrid(centres, centres, indexing="ij"))
                world = self._ego_pose(sample) @ np.stack([x, y, np.zeros_like(x), np.ones_like(x)])
                drivable = open_map(file_inside(self.folder, sample.map))
                on_road = drivable.contains(world[0], world[1]).reshape(cells, cells)
                ground = np.where(on_road, GROUND.index("road"), GROUND.index("terrain"))
                ground = with_objects(ground, boxes, rules)
        except MissingFileError as error:
            raise UserError("D015.scene-no-map", where=str(error)) from None
        except BadSampleError as error:
            raise BadSampleError(f"sample {sample.token}: {error}") from None
        return SimulatedScene(cameras, points, boxes, ground, radar, rig)

    def num_points(self, number: int) -> tuple[int, int]:
        """Return the LiDAR and radar points of a scene inside the grid."""
        sample = self.tables.samples[number]
        return len(self._lidar(sample)), len(self._radar(sample, np.linalg.inv(self._ego_pose(sample))))

    def _ego_pose(self, sample: KeyFrame) -> np.ndarray:
        return self.tables.ego_poses[self.tables.recordings[sample.recordings[LIDAR]].ego_pose]

    def _placed(self, recording: SensorRecording, to_vehicle: np.ndarray) -> np.ndarray:
        """Return the matrix from the coordinates of a sensor, when it recorded, to those of the sample's vehicle."""
        tables = self.tables
        return to_vehicle @ tables.ego_poses[recording.ego_pose] @ tables.calibrations[recording.calibration].pose

    def _cameras(self, sample: KeyFrame, to_vehicle: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the images, and the calibration of each camera for them."""
        rules, images = self.rules, []
        if not rules.cameras:
            return black_image(rules)[None][:0], None
        rig = np.ones((rules.cameras, RIG_NUMBERS), dtype=np.float32)
        for number, channel in enumerate(CAMERAS):
            if channel not in sample.recordings:
                images.append(self._absent(sample, channel, black_image(rules), "cameras"))
                continue
            recording = self.tables.recordings[sample.recordings[channel]]
            pose, matrix = (
                self._placed(recording, to_vehicle),
                self.tables.calibrations[recording.calibration].intrinsic,
            )
            ahead = pose[:3, 2]  # a camera looks along its z; its x points right and its y down
            across, down = rules.width / recording.size[0], rules.height / recording.size[1]
            rig[number] = (math.atan2(ahead[1], ahead[0]), matrix[0, 0] * across, matrix[0, 2] * across,
                           matrix[1, 2] * down, pose[2, 3], pose[0, 3], pose[1, 3])  # fmt: skip
            file = file_inside(self.folder, recording.file)
            read = self.options.read_or(black_image(rules), "cameras", lambda file=file: read_camera(file, rules))
            images.append(read)
        return np.stack(images), rig

    def _lidar(self, sample: KeyFrame) -> np.ndarray:
        if not self.rules.lidar:
            return no_points("lidar")
        recording = self.tables.recordings[sample.recordings[LIDAR]]
        points = self.options.read_or(
            no_points("lidar"), "lidar", lambda: read_lidar(file_inside(self.folder, recording.file))
        )
        return inside_grid(moved_points(points, self.tables.calibrations[recording.calibration].pose), self.rules,
                           "LiDAR points")  # fmt: skip

    def _radar(self, sample: KeyFrame, to_vehicle: np.ndarray) -> np.ndarray:
        """Return the points of the newest sweeps of each radar, moved with the vehicle."""
        if not self.rules.radar:
            return no_points("radar")
        now = self.tables.recordings[sample.recordings[LIDAR]].microseconds
        parts = [no_points("radar")]

        def read(recording: SensorRecording) -> np.ndarray:
            pose, age = self._placed(recording, to_vehicle), (now - recording.microseconds) / 1e6
            return swept_points(read_radar(file_inside(self.folder, recording.file)), pose, age)

        for channel in RADAR_CHANNELS:
            if channel not in sample.recordings:
                parts.append(self._absent(sample, channel, no_points("radar"), "radar"))
                continue
            token = sample.recordings[channel]
            for _ in range(self.options.radar_sweeps):
                if not token:
                    break
                recording = self.tables.recordings[token]
                parts.append(self.options.read_or(no_points("radar"), "radar", lambda each=recording: read(each)))
                token = recording.previous
        return inside_grid(np.concatenate(parts), self.rules, "radar points")

    def _absent(self, sample: KeyFrame, channel: str, empty: np.ndarray, sensor: Sensor) -> np.ndarray:
        """Return `empty` for a sensor that a sample has no key frame of, if that is allowed."""

        def missing() -> np.ndarray:
            raise MissingFileError(f"{self.folder}, sample {sample.token}: no key frame of {channel}")

        return self.options.read_or(empty, sensor, missing)

    def _boxes(self, sample: KeyFrame, to_vehicle: np.ndarray) -> np.ndarray:
        """Return the boxes with a point of LiDAR or radar in them, whose centre is inside the grid."""
        boxes = []
        for each in self.tables.annotations.get(sample.token, ()):
            pose, (width, length, height) = to_vehicle @ each.pose, each.size
            yaw = math.atan2(pose[1, 0], pose[0, 0])
            yaw = (yaw + math.pi / 2) % math.pi - math.pi / 2  # a box looks the same from both ends
            if each.num_points and max(abs(pose[0, 3]), abs(pose[1, 3])) < self.rules.reach:
                kind = OBJECTS.index(CATEGORIES[each.category])
                boxes.append([*pose[:3, 3], length, width, height, yaw, kind])
        return np.array(boxes, dtype=np.float32).reshape(-1, BOX_NUMBERS)


def table_folders(folder: Path) -> list[Path]:
    """Return the folders of tables in a folder of nuScenes, such as v1.0-mini."""
    return sorted(each for each in folder.glob("v1.0-*") if (each / "sample_data.json").is_file())


def open_nuscenes(folder: Path, rules: SceneRules, options: SceneOptions) -> NuscenesScenes:
    """Return the samples of a folder in nuScenes' layout. Raises UserError if they do not fit the model."""
    found = table_folders(folder)
    if options.version is not None:
        tables_at = folder / options.version
        if tables_at not in found:
            raise wrong_table(templated("there is no version {version}", version=options.version), folder)
    elif len(found) > 1:
        raise UserError("D016.several-versions", where=str(folder), found=", ".join(each.name for each in found))
    else:
        tables_at = found[0]
    tables = read_tables(tables_at, rules.sensors, CATEGORIES)
    if not tables.samples:
        raise wrong_table("there is no sample", tables_at)
    if rules.cameras not in (0, len(CAMERAS)):
        raise UserError(
            "D016.nuscenes-cameras-model", where=str(tables_at), num_cameras=len(CAMERAS), cameras=rules.cameras
        )
    for each in tables.recordings.values() if rules.cameras else ():
        if tables.calibrations[each.calibration].modality == "camera":
            if min(each.size) <= 0:
                raise wrong_table("an image has no width or height", tables_at)
            camera_scale("nuScenes", each.size, rules, str(tables_at))
    for sample in tables.samples:
        if LIDAR not in sample.recordings:
            raise wrong_table(f"sample {sample.token} has no key frame of {LIDAR}, its reference", tables_at)
    sizes = [(tables_at / f"{table}.json").stat().st_size for table in TABLES]
    text = "\n".join([tables_at.name, repr(sizes), *(sample.token for sample in tables.samples)])
    return NuscenesScenes(folder, rules, options, tables, hashlib.sha256(text.encode()).hexdigest())
