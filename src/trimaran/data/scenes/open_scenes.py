"""Recorded scenes in either layout: our index, or the tables of nuScenes. Does not import torch."""

from pathlib import Path

from trimaran.core.input_rules import ScenePoints, SceneRules
from trimaran.data.scenes.nuscenes_scenes import open_nuscenes, table_folders
from trimaran.data.scenes.recorded_scenes import INDEX, SceneRecords, open_index
from trimaran.data.scenes.sensor_files import SceneOptions

MEASURED_SCENES = 16


def open_scenes(path: str, rules: SceneRules, options: SceneOptions | None = None) -> SceneRecords:
    """Return the scenes in the folder `path`. Raises UserError if they do not fit the model."""
    folder, options = Path(path).expanduser().absolute(), options or SceneOptions()
    if not (folder / INDEX).exists() and (options.version is not None or table_folders(folder)):
        return open_nuscenes(folder, rules, options)
    return open_index(folder, rules, options)


def measure_points(records: SceneRecords) -> ScenePoints:
    """Return how many points a scene has on average, found in a few scenes spread over all of them."""
    count = min(MEASURED_SCENES, len(records))
    found = [records.num_points(number * len(records) // count) for number in range(count)]
    lidar, radar = (sum(each) / count for each in zip(*found, strict=True))
    return ScenePoints(lidar=lidar, radar=radar, num_scenes=count, own_rigs=records.rig is None)
