"""Scenes of nuScenes: tables and files are read directly, in the coordinates of the vehicle."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.nuscenes_files import (
    EGO_SPEED,
    EGO_YAW,
    FOCAL,
    FRAME,
    RADAR_YAWS,
    SWEEP,
    VERSION,
    write_nuscenes,
    write_radar,
)
from trimaran.core import GROUND, UNKNOWN_GROUND, DataSection, SceneRules, ScenesSection, UserError
from trimaran.data import (
    BadSampleError,
    DataShare,
    Loader,
    SceneOptions,
    measure_points,
    open_scenes,
    read_lidar,
    read_radar,
    scene_feeds,
    scenes_digest,
)
from trimaran.models import PERCEPTION_PRESETS, Opaque, perception_outline
from trimaran.nets import camera_bias, initialise, perception_network
from trimaran.train import PerceptionObjective

SPEC = replace(
    PERCEPTION_PRESETS["tiny-radar"], cameras=6, height=16, width=32, camera_widths=(8, 8), lidar_layers=1,
    fusion_layers=1, hidden=16, heads=2, ffn=16, cells=12,
)  # fmt: skip
RULES = SPEC.scenes()
SHARE = DataShare(rank=0, dp=1, micro_batch=2, grad_accum=1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nuscenes")
    write_nuscenes(root)
    return root


def opened(root: Path, rules: SceneRules = RULES, **options: Any) -> Any:
    return open_scenes(str(root), rules, SceneOptions(**options))


def test_boxes_are_in_the_vehicles_coordinates_and_of_the_models_classes(written: Path) -> None:
    records = opened(written)
    assert len(records) == 3
    for number in range(3):
        (box,) = records.scene(number).boxes  # the cone is no target
        driven = EGO_SPEED * number * FRAME / 1e6  # along x of the world
        wanted = [10 - driven * math.cos(EGO_YAW), 2 + driven * math.sin(EGO_YAW), 0.8, 4.5, 1.9, 1.6, 0.2, 0]
        np.testing.assert_allclose(box, wanted, atol=1e-4)


def test_lidar_points_are_moved_to_the_vehicle_and_scaled(written: Path) -> None:
    # The LiDAR is turned by -90 degrees: its y is the vehicle's x. The other point is outside the grid.
    np.testing.assert_allclose(opened(written).scene(0).points, [[5.9, 0.0, 0.8, 1.0]], atol=1e-5)


def test_radar_points_are_filtered_and_aggregated_over_sweeps(written: Path) -> None:
    radar = opened(written).scene(1).radar
    front = radar[np.abs(radar[:, 1] - 1.5) < 1.0]
    front = front[(front[:, 0] > 6)]
    ages = np.arange(3) * SWEEP / 1e6
    np.testing.assert_allclose(front[:, 6], ages, atol=1e-6)
    # The point lies 4 m ahead and 1 m left of a radar at (3.4, 0.5, 0.5); older ones come from where the vehicle was.
    moved = EGO_SPEED * ages
    wanted = np.stack([7.4 - moved * math.cos(EGO_YAW), 1.5 + moved * math.sin(EGO_YAW)], axis=1)
    np.testing.assert_allclose(front[:, :2], wanted, atol=1e-4)
    np.testing.assert_allclose(front[:, 2:6], [[0.5, 7.5, 2.0, 1.0]] * 3, atol=1e-5)
    assert len(radar) == 3 * len(RADAR_YAWS)
    left = radar[(np.abs(radar[:, 4] + 1.0) < 1e-4) & (np.abs(radar[:, 5] - 2.0) < 1e-4)]
    assert len(left) == 3  # turned by 90 degrees, (2, 1) is (-1, 2)
    assert len(opened(written, radar_sweeps=1).scene(1).radar) == len(RADAR_YAWS)


def test_the_calibration_of_cameras_is_that_of_the_tables(written: Path) -> None:
    scene = opened(written).scene(0)
    assert scene.rig is not None
    assert scene.cameras.shape == (6, 3, 16, 32)
    headings = np.degrees(scene.rig[:, 0])
    np.testing.assert_allclose(headings, [0, 55, 110, 180, -110, -55], atol=1e-3)
    np.testing.assert_allclose(scene.rig[:, 1:], [[FOCAL / 2, 16, 8, 1.5, 1.7, 0.1]] * 6, atol=1e-5)


def test_a_cell_looks_at_the_pixel_that_the_cameras_matrix_projects_it_to(written: Path) -> None:
    scene = opened(written).scene(0)
    assert scene.rig is not None
    bias = camera_bias(RULES, SPEC.grid, torch.device("cpu"), torch.from_numpy(scene.rig))
    rows, columns = SPEC.grid
    cell = (10, 6)  # at x 9, y 1: ahead of the front camera, at (1.7, 0.1), by 7.3 m, and 0.9 m to its left
    best = int(bias[cell[0] * RULES.cells + cell[1], : rows * columns].argmax())
    pixel = 16 - FOCAL / 2 * 0.9 / 7.3
    assert best % columns == int(pixel // (32 / columns))


def test_ground_is_drivable_where_the_map_is_and_unknown_without_one(written: Path, tmp_path: Path) -> None:
    ground = opened(written).scene(0).segmentation
    assert set(np.unique(ground)) == {0, 1, 2}
    centres = (np.arange(12) + 0.5) * RULES.cell - RULES.reach
    x, y = np.meshgrid(centres, centres, indexing="ij")
    world_y = 95 + x * math.sin(EGO_YAW) + y * math.cos(EGO_YAW)
    free = ground != GROUND.index("object")
    np.testing.assert_array_equal(ground[free] == GROUND.index("road"), world_y[free] < 100)
    write_nuscenes(tmp_path / "n", with_map=False)
    assert (opened(tmp_path / "n").scene(0).segmentation == UNKNOWN_GROUND).all()


@pytest.mark.parametrize("changes", [{}, {"cameras": 0, "fusion_layers": 0}, {"lidar_layers": 0}])
def test_a_model_trains_on_batches_of_nuscenes(written: Path, changes: dict[str, Any]) -> None:
    spec = replace(SPEC, **changes)
    section = DataSection(source="scenes", path=str(written), holdout=0.34)
    training, holdout = scene_feeds(section, spec.scenes(), seed=0, share=SHARE)
    assert holdout is not None
    assert set(holdout.samples(0, [0])) == {2}
    with Loader(training, steps=1, workers=1) as loader:
        inputs = next(loader).micro(0)
    made = perception_network(spec)
    initialise(made.module, seed=0, spec=spec)
    output, _ = made.forward(inputs)
    loss = PerceptionObjective(spec.scenes()).losses(made, output, inputs).total
    loss.backward()
    assert loss.isfinite()
    if "cameras" in inputs:
        assert inputs["rig"].shape == (2, 6, 7)
        alone = {name: each[:1] for name, each in inputs.items() if name in ("cameras", "rig", "valid")}
        for name, rows in (("points", "point_rows"), ("radar_points", "radar_point_rows")):
            if name in inputs:
                alone |= {name: inputs[name][inputs[rows] == 0], rows: inputs[rows][inputs[rows] == 0]}
        torch.testing.assert_close(made.forward(alone)[0], output[:1], rtol=1e-4, atol=1e-5)


def test_cells_without_ground_truth_have_no_loss(tmp_path: Path) -> None:
    write_nuscenes(tmp_path / "n", with_map=False)
    training, _ = scene_feeds(
        DataSection(source="scenes", path=str(tmp_path / "n"), holdout=0.0), RULES, seed=0, share=SHARE
    )
    with Loader(training, steps=1) as loader:
        inputs = next(loader).micro(0)
    made = perception_network(SPEC)
    initialise(made.module, seed=0, spec=SPEC)
    output, _ = made.forward(inputs)
    losses = PerceptionObjective(SPEC.scenes()).losses(made, output, inputs)
    assert losses.parts is not None
    assert losses.parts[2, 0] == 0 < losses.parts[0, 0]
    assert PerceptionObjective(SPEC.scenes()).score(made, output, inputs)[2].tolist() == [0, 0]


def test_points_are_counted_for_predictions(written: Path) -> None:
    points = measure_points(opened(written))
    assert (points.lidar, points.radar, points.num_scenes) == (1.0, 15.0, 3)
    assert points.own_rigs
    shared, own = (
        sum(block.saved_bytes for block, _ in tower.runs if isinstance(block, Opaque))
        for counted in (replace(points, own_rigs=False), points)
        for tower in perception_outline(SPEC, counted).towers
        if tower.name == "fusion"
    )
    assert own - shared == 4 * 12 * 12 * SPEC.num_tokens  # the attention bias of a scene


def test_the_digest_changes_with_the_tables_and_the_sweeps(written: Path, tmp_path: Path) -> None:
    write_nuscenes(tmp_path / "n", samples=2)
    sections = [
        DataSection(source="scenes", path=str(path), scenes=ScenesSection(radar_sweeps=sweeps))
        for path, sweeps in ((written, 6), (written, 2), (tmp_path / "n", 6))
    ]
    assert len({scenes_digest(each, RULES) for each in sections}) == 3


def test_missing_files_are_named_unless_the_sensor_is_optional(tmp_path: Path) -> None:
    write_nuscenes(tmp_path, samples=1)
    for channel, sensor in (("RADAR_FRONT", "radar"), ("LIDAR_TOP", "lidar"), ("CAM_BACK", "cameras")):
        (file,) = (tmp_path / "samples" / channel).iterdir()
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(UserError, match=file.name) as caught:
            opened(tmp_path).scene(0)
        assert caught.value.code == "D015"
        assert opened(tmp_path, optional=(sensor,)).scene(0).cameras.shape == (6, 3, 16, 32)
        file.write_bytes(content)


def test_a_missing_map_is_named(tmp_path: Path) -> None:
    write_nuscenes(tmp_path, samples=1)
    (tmp_path / "maps" / "m.png").unlink()
    with pytest.raises(UserError, match=r"m\.png") as caught:
        opened(tmp_path).scene(0)
    assert caught.value.code == "D015"


def test_a_sample_without_a_radar_channel_is_an_error_unless_radar_is_optional(tmp_path: Path) -> None:
    write_nuscenes(tmp_path, samples=1)
    table = tmp_path / VERSION / "sample_data.json"
    rows = [row for row in json.loads(table.read_text()) if "RADAR_BACK_LEFT" not in row["token"]]
    table.write_text(json.dumps(rows))
    with pytest.raises(UserError, match="no key frame of RADAR_BACK_LEFT"):
        opened(tmp_path).scene(0)
    assert len(opened(tmp_path, optional=("radar",)).scene(0).radar) == 3 * (len(RADAR_YAWS) - 1)
    assert len(opened(tmp_path, replace(SPEC, radar_layers=0).scenes()).scene(0).radar) == 0


def test_wrong_tables_are_refused(tmp_path: Path) -> None:
    write_nuscenes(tmp_path, samples=1)
    with pytest.raises(UserError, match="nuScenes has 6 cameras, and the model 3"):
        opened(tmp_path, replace(RULES, cameras=3))
    with pytest.raises(UserError, match="would be distorted"):
        opened(tmp_path, replace(RULES, height=32))
    with pytest.raises(UserError, match=r"there is no version v1\.0-test"):
        opened(tmp_path, version="v1.0-test")
    table = tmp_path / VERSION / "ego_pose.json"
    kept = table.read_text()
    for content, reason in (("[{", "cannot be read"), ("{}", "not a list"), ("[]", "refers to what is not there")):
        table.write_text(content)
        with pytest.raises(UserError, match=reason) as caught:
            opened(tmp_path)
        assert caught.value.code == "D016"
    table.unlink()
    with pytest.raises(UserError, match=r"ego_pose\.json is missing"):
        opened(tmp_path)
    table.write_text(kept)
    (tmp_path / "v1.0-other").mkdir()
    (tmp_path / "v1.0-other" / "sample_data.json").write_text("[]")
    with pytest.raises(UserError, match=r"several versions: v1\.0-mini, v1\.0-other"):
        opened(tmp_path)


def test_damaged_sensor_files_make_a_bad_sample(tmp_path: Path) -> None:
    path = tmp_path / "r.pcd"
    write_radar(path, [{"x": 1.0}, {"x": 2.0}])
    assert read_radar(path)[:, 0].tolist() == [1.0, 2.0]
    whole = path.read_bytes()
    wrong = {
        "instead of 2 points": whole[:-1],
        "not binary": whole.replace(b"DATA binary", b"DATA ascii"),
        "no .pcd header": b"\x00" * 50,
        "rcs": whole.replace(b" rcs ", b" abc "),
    }
    for reason, content in wrong.items():
        path.write_bytes(content)
        with pytest.raises(BadSampleError, match=reason):
            read_radar(path)
    write_radar(path, [{"x": float("nan")}, {"x": 2.0}])  # how nuScenes stores an empty sweep
    assert len(read_radar(path)) == 0
    path.write_bytes(b"\x00" * 7)
    with pytest.raises(BadSampleError, match="float32"):
        read_lidar(path)
