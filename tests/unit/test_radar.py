"""Radar beside cameras and LiDAR: its points, its tower, models and scenes that lack a sensor."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimaran.core import RADAR_NUMBERS, DataSection, ModelSection, ScenesSection, UserError
from trimaran.data import (
    INDEX,
    SWEEP_SECONDS,
    SWEEPS,
    DataShare,
    Inputs,
    Loader,
    SceneOptions,
    flat_pose,
    make_scene,
    measure_points,
    open_scenes,
    scene_feeds,
    scenes_digest,
    swept_points,
    write_scenes,
)
from trimaran.models import (
    PERCEPTION_PRESETS,
    PerceptionSpec,
    module_names,
    outline_for,
    perception_config,
    perception_outline,
    spec_of,
)
from trimaran.nets import PerceptionNetwork, initialise, perception_network
from trimaran.train import PerceptionObjective

SMALL = replace(
    PERCEPTION_PRESETS["tiny-radar"], cameras=3, height=8, width=16, camera_widths=(8, 8), lidar_layers=1,
    fusion_layers=1, hidden=16, heads=2, ffn=16, cells=8,
)  # fmt: skip
NO_CAMERAS = {"cameras": 0, "fusion_layers": 0}
SENSORS: dict[str, dict[str, Any]] = {
    "all": {},
    "cameras": {"lidar_layers": 0, "radar_layers": 0},
    "cameras-radar": {"lidar_layers": 0},
    "lidar-radar": NO_CAMERAS,
    "lidar": NO_CAMERAS | {"radar_layers": 0},
    "radar": NO_CAMERAS | {"lidar_layers": 0},
}
SPECS = {name: replace(SMALL, **changes) for name, changes in SENSORS.items()}
SHARE = DataShare(rank=0, dp=1, micro_batch=3, grad_accum=1)


def network(spec: PerceptionSpec, blocks: range | None = None) -> PerceptionNetwork:
    made = perception_network(spec, blocks)
    initialise(made.module, seed=1, spec=spec)
    return made


def batch(spec: PerceptionSpec, section: DataSection | None = None, workers: int = 0) -> Inputs:
    feed, _ = scene_feeds(section or DataSection(source="scenes"), spec.scenes(), seed=3, share=SHARE)
    with Loader(feed, steps=1, workers=workers) as loader:
        return next(loader).micro(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rules = SMALL.scenes()
    write_scenes([make_scene(0, number, rules) for number in range(4)], rules, tmp_path / "scenes")
    return tmp_path / "scenes"


def section(folder: Path, **scenes: Any) -> DataSection:
    return DataSection(source="scenes", path=str(folder), holdout=0.0, scenes=ScenesSection(**scenes))


def change(folder: Path, **fields: Any) -> None:
    tree = json.loads((folder / INDEX).read_text())
    for scene in tree["scenes"]:
        scene |= fields
    (folder / INDEX).write_text(json.dumps(tree))


def test_radar_changes_no_other_sensor_of_a_scene() -> None:
    with_radar, without = (make_scene(0, 5, SPECS[name].scenes()) for name in ("all", "cameras"))
    for name in ("cameras", "points", "boxes", "segmentation"):
        np.testing.assert_array_equal(getattr(with_radar, name), getattr(without, name))
    assert len(with_radar.radar) > 0 == len(without.radar)
    np.testing.assert_array_equal(with_radar.radar, make_scene(0, 5, SMALL.scenes()).radar)


def test_simulated_points_come_from_all_sweeps_with_radial_velocities() -> None:
    points = np.concatenate([make_scene(0, number, SMALL.scenes()).radar for number in range(20)])
    assert points.shape[1] == RADAR_NUMBERS
    np.testing.assert_allclose(np.unique(points[:, 6]), np.arange(SWEEPS) * SWEEP_SECONDS, atol=1e-6)
    fast = points[np.hypot(points[:, 4], points[:, 5]) > 3]
    assert len(fast) > 20
    # A radar is within 2 m of the centre, so far points have velocities along the line to them.
    far = fast[np.hypot(fast[:, 0], fast[:, 1]) > 8]
    turn = np.arctan2(far[:, 5], far[:, 4]) - np.arctan2(far[:, 1], far[:, 0])
    assert (np.abs(np.sin(turn)) < 0.35).all()


def test_a_sweep_is_turned_and_moved_with_its_radar_and_its_velocity_only_turned() -> None:
    pose = flat_pose(2.0, 1.0, 0.5, np.pi / 2)
    moved = swept_points(np.array([[3.0, 1.0, 0.0, 12.0, 4.0, 0.5]]), pose, 0.25)
    np.testing.assert_allclose(moved, [[1.0, 4.0, 0.5, 12.0, -0.5, 4.0, 0.25]], atol=1e-6)


@pytest.mark.parametrize("name", SENSORS)
def test_a_model_trains_with_any_sensors_and_its_stages_compute_the_same(name: str) -> None:
    spec = SPECS[name]
    inputs, full = batch(spec), network(spec)
    output, _ = full.forward(inputs)
    PerceptionObjective(spec.scenes()).losses(full, output, inputs).total.backward()
    assert all(each.grad is not None for each in full.module.parameters())
    for split in range(1, spec.layers, 1 if name == "all" else 3):
        first, second = network(spec, range(split)), network(spec, range(split, spec.layers))
        stream, _ = first.forward(inputs)
        assert tuple(stream.shape) == first.stream_shape(inputs, tp=1)[1] == second.stream_shape(inputs, tp=1)[0]
        again, _ = second.forward(inputs, stream)
        torch.testing.assert_close(again, output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SENSORS)
def test_the_outline_equals_the_model_with_any_sensors(name: str) -> None:
    spec = SPECS[name]
    shape = {key: each for key, each in perception_config(spec).items() if key not in ("model_type", "architectures")}
    model = ModelSection(family="perception", shape=shape)
    with torch.device("meta"):
        made = perception_network(spec)
    outline = outline_for(model, DataSection(source="scenes"))
    assert [each.name for each in outline.towers] == list(made.towers)
    assert outline.layers == spec.layers == len(made.blocks)
    for tower in outline.towers:
        held = sum(
            each.numel() for key, each in made.module.named_parameters() if key.startswith(made.towers[tower.name])
        )
        assert tower.parameters == held, tower.name
    real = {key for key, _ in made.module.named_modules() if key}
    named = set(module_names(spec))
    assert {key for key in named if not key.endswith("skip")} <= real <= named


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"cameras": 0}, "fusion layers attend to cameras"),
        ({"fusion_layers": 0}, "leave the cameras without effect"),
        (NO_CAMERAS | {"lidar_layers": 0}, "the model has no sensor"),
        ({"radar_layers": -1}, "is not from 0"),
    ],
)
def test_a_shape_without_sense_is_refused(shape: dict[str, int], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        spec_of(ModelSection(family="perception", preset="tiny", shape=shape))
    assert caught.value.code == "M009"


def test_the_config_of_an_older_model_has_no_radar(tmp_path: Path) -> None:
    config = perception_config(PERCEPTION_PRESETS["tiny"])
    del config["radar_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = spec_of(ModelSection(family="perception", path=str(tmp_path)))
    assert spec == replace(PERCEPTION_PRESETS["tiny"], name=tmp_path.name)


def test_the_digest_of_scenes_of_older_runs_does_not_change() -> None:
    rules = replace(SMALL, radar_layers=0).scenes()
    expected = "scenes-1-0-100000-SceneRules(cameras=3, height=8, width=16, cells=8, reach=12.0)"
    assert scenes_digest(DataSection(source="scenes"), rules) == expected
    assert scenes_digest(DataSection(source="scenes"), SMALL.scenes()) != expected


def test_recorded_sweeps_are_read_back_in_the_coordinates_of_the_vehicle(folder: Path) -> None:
    records = open_scenes(str(folder), SMALL.scenes())
    for number in range(4):
        ours, wanted = records.scene(number).radar, make_scene(0, number, SMALL.scenes()).radar
        order = [np.lexsort(each.round(3).T[::-1]) for each in (ours, wanted)]
        np.testing.assert_allclose(ours[order[0]], wanted[order[1]], atol=2e-5)


def test_only_the_newest_sweeps_are_used_and_an_old_one_is_moved_with_the_vehicle(folder: Path) -> None:
    newest = open_scenes(str(folder), SMALL.scenes(), SceneOptions(radar_sweeps=1)).scene(0).radar
    assert set(newest[:, 6].tolist()) == {0.0}
    np.save(folder / "one.npy", np.array([[2.0, 0.0, 0.0, 5.0, 1.0, 0.0]]))
    change(folder, radar=[{"radar": 0, "file": "one.npy", "age": 0.5, "pose": [-3.0, 0.0, 0.0]}])
    moved = open_scenes(str(folder), SMALL.scenes()).scene(0).radar
    np.testing.assert_allclose(moved, [[0.8, 0.0, 0.5, 5.0, 1.0, 0.0, 0.5]], atol=1e-6)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_missing_radar_file_is_an_error_that_names_it_unless_radar_is_optional(folder: Path, workers: int) -> None:
    for file in folder.glob("*-radar-0-000.npy"):
        file.unlink()
    with pytest.raises(UserError, match=r"radar points: a file is missing\n.*radar-0-000.npy") as caught:
        batch(SMALL, section(folder), workers)
    assert caught.value.code == "D015"
    inputs = batch(SMALL, section(folder, optional=("radar",)), workers)
    assert inputs["valid"].all()
    assert len(inputs["radar_points"]) > 0


def test_scenes_without_a_sensor_are_used_if_it_is_optional(folder: Path) -> None:
    change(folder, radar=None, lidar=None)
    with pytest.raises(UserError, match="names no lidar"):
        batch(SMALL, section(folder, optional=("radar",)))
    for file in folder.glob("*-0.png"):
        file.unlink()
    inputs = batch(SMALL, section(folder, optional=("radar", "lidar", "cameras")))
    assert len(inputs["radar_points"]) == len(inputs["points"]) == 0
    assert not inputs["cameras"][:, 0].any()
    assert inputs["cameras"][:, 1].any()
    output, _ = network(SMALL).forward(inputs)
    assert output.isfinite().all()
    assert len(batch(SPECS["cameras"], section(folder, optional=("cameras",)))["cameras"]) == 3


@pytest.mark.parametrize(
    ("sweep", "reason"),
    [
        ({"radar": 9, "file": "x.npy"}, "is not one of 5 radars"),
        ({"file": "x.npy"}, "lacks radar"),
        ({"radar": 0, "file": "000000-ground.npy"}, "it has not the shape"),
        ({"radar": 0, "file": "../x.npy"}, "leaves the folder"),
    ],
)
def test_a_wrong_sweep_makes_a_bad_scene(folder: Path, sweep: dict[str, Any], reason: str) -> None:
    change(folder, radar=[sweep])
    with pytest.raises(Exception, match=reason):
        open_scenes(str(folder), SMALL.scenes()).scene(0)


def test_predictions_count_the_points_of_the_data(folder: Path) -> None:
    points = measure_points(open_scenes(str(folder), SMALL.scenes()))
    scenes = [make_scene(0, number, SMALL.scenes()) for number in range(4)]
    assert points.radar == np.mean([len(each.radar) for each in scenes])
    assert points.lidar == np.mean([len(each.points) for each in scenes])
    spec = PERCEPTION_PRESETS["base-radar"]
    few, many = (perception_outline(spec, replace(points, radar=count)) for count in (100.0, 10_000.0))
    towers = [{each.name: each for each in outline.towers} for outline in (few, many)]
    (few_stem, _), (many_stem, _) = (each["radar"].runs[0] for each in towers)
    assert many_stem.flops(0, 0) == pytest.approx(100 * few_stem.flops(0, 0), rel=0.01)
    assert towers[0]["lidar"] == towers[1]["lidar"]
