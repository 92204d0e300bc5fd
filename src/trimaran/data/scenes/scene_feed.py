"""Batches of simulated or recorded scenes, in the order of the seed. Does not import torch: loader processes use it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimaran.core import RIG_NUMBERS, DataSection, ScenePoints, SceneRules, Sensor
from trimaran.data.feed import DataShare, LoadedArrays, QuarantiningFeed, num_held_out, positions
from trimaran.data.scenes.nuscenes_scenes import NuscenesScenes, open_nuscenes, table_folders
from trimaran.data.scenes.recorded_scenes import INDEX, RecordedScenes, SceneOptions, open_index
from trimaran.data.scenes.simulated_scenes import SimulatedScene, blank_scene, make_scene

SceneRecords = RecordedScenes | NuscenesScenes
MEASURED_SCENES = 16
NUM_SCENES = 100_000  # per epoch; scenes are generated on the fly
SCENES_SEED = 0  # of the scene content; train.seed only changes their order
VERSION = 1  # of the simulation; increase it when the content of a scene changes
# Arrays of different lengths: the array with the row of each element, the field of a scene, and the sensor, if any.
RAGGED: dict[str, tuple[str, str, Sensor | None]] = {
    "points": ("point_rows", "points", "lidar"),
    "radar_points": ("radar_point_rows", "radar", "radar"),
    "boxes": ("box_rows", "boxes", None),
}


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


@dataclass(frozen=True, slots=True)
class SceneRange:
    """Scenes `first` to `last` (exclusive), simulated unless they are `recorded`. A scene's number is its sample id."""

    rules: SceneRules
    first: int
    last: int
    recorded: SceneRecords | None = None

    def __len__(self) -> int:
        return self.last - self.first

    def scene(self, number: int) -> SimulatedScene:
        return make_scene(SCENES_SEED, number, self.rules) if self.recorded is None else self.recorded.scene(number)


class SceneFeed(QuarantiningFeed):
    """A `feed.BatchFeed` of `scenes`, at least one. A quarantined one keeps its row: black, empty and not `valid`."""

    def __init__(
        self, scenes: SceneRange, *, seed: int, share: DataShare, quarantined: frozenset[int] = frozenset()
    ) -> None:
        assert len(scenes) > 0
        self._scenes, self._seed, self.quarantined = scenes, seed, quarantined
        self.share, self.num_rows = share, len(scenes)

    def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
        scenes, valid, rules = [], [], self._scenes.rules
        for number in self.samples(step, [self.share.rank]):
            at(number)
            valid.append(number not in self.quarantined)
            scenes.append(self._scenes.scene(number) if valid[-1] else blank_scene(rules))
        shape, size = (self.share.grad_accum, self.share.micro_batch), self.share.micro_batch
        arrays: dict[str, np.ndarray] = {"valid": np.array(valid).reshape(shape)}
        for name in ("cameras", "segmentation") if rules.cameras else ("segmentation",):
            stacked = np.stack([getattr(each, name) for each in scenes])
            arrays[name] = stacked.reshape(*shape, *stacked.shape[1:])
        if rules.cameras and (recorded := self._scenes.recorded) is not None:
            if recorded.rig is not None:
                arrays["rig"] = np.broadcast_to(recorded.rig, (shape[0], *recorded.rig.shape)).copy()
            else:  # each scene has its own calibration; a quarantined one has none
                blank = np.ones((rules.cameras, RIG_NUMBERS), dtype=np.float32)
                rigs = np.stack([blank if each.rig is None else each.rig for each in scenes])
                arrays["rig"] = rigs.reshape(*shape, *rigs.shape[1:])
        offsets: dict[str, tuple[int, ...]] = {}
        for name, (rows, field, sensor) in RAGGED.items():
            if sensor is not None and sensor not in rules.sensors:
                continue
            ragged = [getattr(each, field) for each in scenes]
            counts = np.array([len(each) for each in ragged])
            ends = np.concatenate([[0], counts.cumsum()])[::size]
            arrays[name] = np.concatenate(ragged)
            arrays[rows] = np.repeat(np.arange(len(scenes), dtype=np.int32) % size, counts)
            offsets[name] = offsets[rows] = tuple(ends.tolist())
        counted = {"points": "points", "radar_points": "radar_points", "objects": "boxes"}
        metrics = {name: float(len(arrays[array])) for name, array in counted.items() if array in arrays}
        return LoadedArrays(arrays=arrays, num_valid=sum(valid), offsets=offsets, metrics=metrics)

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        indices = self.share.rows_of(range(step, step + 1), data_ranks)[0]
        return tuple((self._scenes.first + positions(self._seed, indices, len(self._scenes))).tolist())

    def steps_in(self, epochs: float) -> int:
        """Return the number of steps in so many epochs; the last step may extend into the next epoch."""
        return -(-round(epochs * self.num_rows) // self.share.global_batch)


def scene_feeds(
    section: DataSection, rules: SceneRules, *, seed: int, share: DataShare, quarantined: frozenset[int] = frozenset()
) -> tuple[SceneFeed, SceneFeed | None]:
    """Return the training feed and the holdout feed (the last `holdout` fraction of the scenes), if any."""
    recorded = recorded_scenes(section, rules) if section.path is not None else None
    count = NUM_SCENES if recorded is None else len(recorded)
    end = count - num_held_out(count, section.holdout)
    feed = SceneFeed(SceneRange(rules, 0, end, recorded), seed=seed, share=share, quarantined=quarantined)
    held_out = SceneRange(rules, end, count, recorded)
    return feed, SceneFeed(held_out, seed=seed, share=share) if held_out else None


def recorded_scenes(section: DataSection, rules: SceneRules) -> SceneRecords:
    """Return the scenes in the folder that the section names."""
    assert section.path is not None
    return open_scenes(section.path, rules, SceneOptions(**dict(section.scenes)))


def scenes_digest(section: DataSection, rules: SceneRules) -> str:
    """Return a string that identifies the content of these scenes. Of recorded ones, only the index is read."""
    added = "" if rules.sensors == ("cameras", "lidar") else f"-{'-'.join(rules.sensors)}"
    if section.path is not None:
        sweeps = f"-{section.scenes.radar_sweeps}-sweeps" if rules.radar else ""
        return f"recorded-{recorded_scenes(section, rules).digest}-{rules}{added}{sweeps}"
    return f"scenes-{VERSION}-{SCENES_SEED}-{NUM_SCENES}-{rules}{added}"
