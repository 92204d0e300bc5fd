"""Recorded scenes: what is written is read back, the cameras' calibration is used, and wrong folders are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from trimaran.core import CAMERA_METRES, RIG_NUMBERS, DataSection, UserError
from trimaran.data import (
    INDEX,
    BadSampleError,
    DataShare,
    make_scene,
    open_scenes,
    scene_feeds,
    scenes_digest,
    write_scenes,
)
from trimaran.models import PERCEPTION_PRESETS
from trimaran.nets import camera_bias

SPEC = replace(PERCEPTION_PRESETS["tiny"], cameras=3, height=8, width=16, cells=8)
RULES = SPEC.scenes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with four recorded scenes."""
    write_scenes([make_scene(0, number, RULES) for number in range(4)], RULES, tmp_path / "scenes")
    return tmp_path / "scenes"


def change(folder: Path, scene: dict[str, Any] | None = None, **fields: Any) -> None:
    tree = json.loads((folder / INDEX).read_text()) | fields
    tree["scenes"][0] |= scene or {}
    (folder / INDEX).write_text(json.dumps(tree))


def test_scenes_are_read_back_as_they_were_written(folder: Path) -> None:
    recorded = open_scenes(str(folder), RULES)
    assert len(recorded) == 4
    for number in range(4):
        ours, wanted = recorded.scene(number), make_scene(0, number, RULES)
        for name in ("cameras", "points", "segmentation"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(wanted, name))
        np.testing.assert_allclose(ours.boxes, wanted.boxes, rtol=1e-6, atol=1e-6)


def test_the_feed_holds_out_the_last_scenes_and_gives_the_calibration(folder: Path) -> None:
    section = DataSection(source="scenes", path=str(folder), holdout=0.25)
    share = DataShare(rank=0, dp=1, micro_batch=1, grad_accum=3)
    training, holdout = scene_feeds(section, RULES, seed=0, share=share)
    assert holdout is not None
    loaded = training.load(0, lambda number: None)
    assert sorted(training.samples(0, [0])) == [0, 1, 2]
    assert set(holdout.samples(0, [0])) == {3}
    assert loaded.arrays["rig"].shape == (3, 3, RIG_NUMBERS)
    assert loaded.num_valid == 3
    assert scenes_digest(section, RULES) == scenes_digest(section, RULES)
    before = scenes_digest(section, RULES)
    change(folder, note="another index")
    assert scenes_digest(section, RULES) != before


def test_the_calibration_of_the_rules_gives_their_bias_and_another_one_does_not(folder: Path) -> None:
    rig = torch.from_numpy(open_scenes(str(folder), RULES).rig)
    own = camera_bias(RULES, SPEC.grid, torch.device("cpu"))
    torch.testing.assert_close(camera_bias(RULES, SPEC.grid, torch.device("cpu"), rig), own)
    turned = rig.clone()
    turned[:, 0] += 2 * torch.pi / 3
    rows = SPEC.grid[0] * SPEC.grid[1]
    moved = camera_bias(RULES, SPEC.grid, torch.device("cpu"), turned)
    torch.testing.assert_close(moved[:, :rows], own[:, rows : 2 * rows], atol=1e-3, rtol=1e-3)


def test_images_of_another_size_are_resized_with_their_calibration(folder: Path) -> None:
    for file in folder.glob("*.png"):
        with Image.open(file) as image:
            larger = image.resize((32, 16))
        larger.save(file)
    cameras = [
        {"width": 32, "height": 16, "focal": 2 * RULES.focal, "centre": [16, 2 * RULES.horizon], "heading": heading,
         "metres": CAMERA_METRES}
        for heading in RULES.headings
    ]  # fmt: skip
    before = open_scenes(str(folder), RULES).rig
    change(folder, cameras=cameras)
    recorded = open_scenes(str(folder), RULES)
    assert recorded.rig is not None
    assert before is not None
    np.testing.assert_allclose(recorded.rig, before, rtol=1e-6)
    assert recorded.scene(0).cameras.shape == (3, 3, 8, 16)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": "nuscenes"}, "the index is not of the format"),
        ({"scenes": []}, "lists no scenes"),
        ({"cameras": []}, "the index has 0 cameras, and the model 3"),
        ({"cameras": [{}] * 3}, "camera 0 lacks heading"),
        ({"cameras": [{"width": 16, "height": 8, "focal": -1, "centre": [8, 4], "heading": 0}] * 3}, "impossible"),
        ({"cameras": [{"width": 16, "height": 16, "focal": 5, "centre": [8, 4], "heading": 0}] * 3}, "distorted"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(fields: dict[str, Any], reason: str, folder: Path) -> None:
    tree = json.loads((folder / INDEX).read_text()) | fields
    (folder / INDEX).write_text(json.dumps(tree))
    with pytest.raises(UserError, match=reason) as caught:
        open_scenes(str(folder), RULES)
    assert caught.value.code == "T066"


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        open_scenes(str(tmp_path), RULES)


@pytest.mark.parametrize(
    ("scene", "reason"),
    [
        ({"cameras": ["000000-0.png"]}, "'cameras' is not a list of 3"),
        ({"lidar": "000000-ground.npy"}, "it has not the shape"),
        ({"lidar": "../../secret.npy"}, "leaves the folder"),
        ({"ground": None}, "is not the name of a file"),
        ({"boxes": [{"centre": [1, 2, 3]}]}, "a box lacks"),
        ({"boxes": [{"centre": [1, 2, 3], "size": [1, 0, 1], "yaw": 0, "class": "car"}]}, "impossible numbers"),
    ],
)
def test_a_scene_with_wrong_files_is_bad(scene: dict[str, Any], reason: str, folder: Path) -> None:
    change(folder, scene=scene)
    recorded = open_scenes(str(folder), RULES)
    with pytest.raises(BadSampleError, match=reason):
        recorded.scene(0)
    assert len(recorded.scene(1).points) > 0
