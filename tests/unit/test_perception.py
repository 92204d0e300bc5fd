"""The perception model, its scenes and its objective."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from trimaran.core import OBJECTS, DataSection, ModelSection, SceneRules, UserError
from trimaran.data import (
    GROUND_HIT,
    LIDAR_METRES,
    DataShare,
    Inputs,
    Loader,
    SensorRays,
    camera_rays,
    cast,
    make_scene,
    scene_feeds,
)
from trimaran.models import PERCEPTION_PRESETS, PerceptionSpec, module_names, outline_for, perception_config, spec_of
from trimaran.nets import PerceptionNetwork, camera_bias, initialise, perception_network
from trimaran.train import PerceptionObjective, box_targets

TINY = PERCEPTION_PRESETS["tiny"]
RULES = TINY.scenes()
SMALL = replace(
    TINY, cameras=3, height=16, width=16, camera_widths=(8, 16), lidar_layers=1, hidden=16, heads=2, ffn=24, cells=12
)
ALONE = DataShare(rank=0, dp=1, micro_batch=4, grad_accum=1)


def network(spec: PerceptionSpec = SMALL, blocks: range | None = None) -> PerceptionNetwork:
    made = perception_network(spec, blocks)
    initialise(made.module, seed=1, spec=spec)
    return made


def batch(spec: PerceptionSpec = SMALL, step: int = 0, quarantined: frozenset[int] = frozenset()) -> Inputs:
    feed, _ = scene_feeds(DataSection(), spec.scenes(), seed=3, share=ALONE, quarantined=quarantined)
    with Loader(feed, start_step=step, steps=step + 1) as loader:
        return next(loader).micro(0)


def only(inputs: Inputs, row: int) -> Inputs:
    """Return one scene of a micro-batch."""
    rows = {name: each[row : row + 1] for name, each in inputs.items() if name in ("cameras", "segmentation", "valid")}
    for name, owners in (("points", "point_rows"), ("boxes", "box_rows")):
        selected = inputs[owners] == row
        rows |= {name: inputs[name][selected], owners: torch.zeros_like(inputs[owners][selected])}
    return rows


def loss_of(made: PerceptionNetwork, inputs: Inputs) -> Tensor:
    output, _ = made.forward(inputs)
    return PerceptionObjective(made.spec.scenes()).losses(made, output, inputs).total


def test_a_scene_is_a_function_of_seed_and_number() -> None:
    first, again, other = (make_scene(0, number, RULES) for number in (7, 7, 8))
    for name in ("cameras", "points", "boxes", "segmentation"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert not np.array_equal(first.points, other.points)


def test_points_lie_on_the_ground_or_on_a_box() -> None:
    scene = make_scene(0, 3, RULES)
    low = scene.points[:, 2] < 0.15
    assert low.any()
    for x, y, z, _ in scene.points[~low]:
        inside = []
        for box_x, box_y, box_z, *size, yaw, _ in scene.boxes:
            along = (x - box_x) * math.cos(yaw) + (y - box_y) * math.sin(yaw)
            across = (y - box_y) * math.cos(yaw) - (x - box_x) * math.sin(yaw)
            gaps = np.abs([along, across, z - box_z]) - np.array(size) / 2
            inside.append(gaps.max())
        assert min(inside) < 0.15


def test_a_ray_hits_the_nearer_of_two_boxes() -> None:
    ahead = SensorRays(np.zeros(1), np.array([[[1.0, 0, 0], [0.6, 0, -0.8]]], dtype=np.float32), LIDAR_METRES)
    near, far = ([x, 0, 1.0, 2.0, 2.0, 2.5, 0.3, 0] for x in (5.0, 9.0))
    distances, hits, _ = cast(ahead, np.array([far, near], dtype=np.float32))
    assert hits.tolist() == [[1, GROUND_HIT]]
    assert distances[0, 0] == pytest.approx(5 - 1 / math.cos(0.3), abs=1e-5)
    assert distances[0, 1] == pytest.approx(LIDAR_METRES / 0.8)


def test_a_cell_attends_to_the_token_that_shows_its_object() -> None:
    boxes = ((6.5, 1.5), (-4.5, 5.5), (0.5, -8.5), (-9.5, -2.5))
    rows, columns = TINY.grid
    bias = camera_bias(RULES, TINY.grid, torch.device("cpu")).view(RULES.cells, RULES.cells, -1)
    for x, y in boxes:
        box = np.array([[x, y, 0.8, 1.0, 1.0, 1.6, 0.0, 0]], dtype=np.float32)
        _, hits, _ = cast(camera_rays(RULES), box)
        shown = (hits == 0).reshape(RULES.cameras, columns, RULES.width // columns, rows, -1).sum(axis=(2, 4))
        best = int(bias[int(x + RULES.reach), int(y + RULES.reach)].argmax())
        assert shown.transpose(0, 2, 1).ravel()[best] > 0, f"the cell at {x}, {y} attends to a token without its box"


def test_the_loss_of_a_scene_does_not_depend_on_the_others_in_its_batch() -> None:
    made, inputs = network(), batch()
    alone = [loss_of(made, only(inputs, row)) for row in range(4)]
    assert loss_of(made, inputs).item() == pytest.approx(sum(each.item() for each in alone), rel=1e-5)


def test_the_loss_is_the_sum_of_its_parts() -> None:
    made, inputs = network(), batch()
    output, _ = made.forward(inputs)
    losses = PerceptionObjective(SMALL.scenes()).losses(made, output, inputs)
    assert losses.parts is not None
    assert losses.parts[:, 0].sum().item() == pytest.approx(losses.total.item())
    assert losses.parts[:, 1].tolist() == [4, 4, 4]


def test_a_quarantined_scene_has_no_weight() -> None:
    made, everything = network(), batch()
    feed, _ = scene_feeds(DataSection(), SMALL.scenes(), seed=3, share=ALONE)
    gone = feed.samples(0, [0])[2]
    inputs = batch(quarantined=frozenset({gone}))
    assert inputs["valid"].tolist() == [True, True, False, True]
    others = sum(loss_of(made, only(everything, row)).item() for row in (0, 1, 3))
    assert loss_of(made, inputs).item() == pytest.approx(others, rel=1e-5)
    without, _ = scene_feeds(DataSection(), SMALL.scenes(), seed=3, share=ALONE, quarantined=frozenset({gone}))
    assert without.num_quarantined(0) == 1


def test_scenes_without_points_and_objects_give_every_parameter_a_gradient() -> None:
    made, inputs = network(), batch()
    empty = {name: inputs[name][:0] for name in ("points", "point_rows", "boxes", "box_rows")}
    loss_of(made, {**inputs, **empty}).backward()
    for name, parameter in made.module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_perfect_predictions_score_one_and_empty_ones_zero() -> None:
    inputs, rules = batch(TINY), RULES
    boxes, rows = inputs["boxes"], inputs["box_rows"].long()
    x, y = ((boxes[:, :2] + rules.reach) / rules.cell).long().unbind(1)
    heat = torch.full((4, len(OBJECTS), rules.cells, rules.cells), -9.0)
    heat[rows, boxes[:, -1].long(), x, y] = 9.0
    numbers = torch.zeros(4, 8, rules.cells, rules.cells)
    numbers[rows, :, x, y] = box_targets(boxes, rules)
    ground = torch.nn.functional.one_hot(inputs["segmentation"], 3).permute(0, 3, 1, 2) * 20.0
    made, objective = network(TINY), PerceptionObjective(TINY.scenes())
    right = objective.score(made, torch.cat([heat, numbers, ground], dim=1), inputs)
    assert right[:, 0].tolist() == right[:, 1].tolist()
    assert right[0, 1] == len(boxes) > 0
    blank = objective.score(made, torch.cat([heat.fill_(-9), numbers, -ground], dim=1), inputs)
    assert blank[:, 0].tolist() == [0, 0, 0, 0]
    losses = objective.losses(made, torch.cat([heat.fill_(-9), numbers, ground], dim=1), inputs)
    assert losses.parts is not None
    assert losses.parts[1, 0] < 1e-4
    assert losses.parts[2, 0] < 1e-4


def test_a_taxi_predicted_as_a_car_does_not_count() -> None:
    inputs = {
        "boxes": torch.tensor([[2.5, 2.5, 0.8, 4, 1.8, 1.5, 0, OBJECTS.index("taxi")]]),
        "box_rows": torch.zeros(1, dtype=torch.int32),
        "valid": torch.ones(1, dtype=torch.bool),
        "segmentation": torch.zeros(1, RULES.cells, RULES.cells, dtype=torch.int64),
    }
    output = torch.full((1, 15, RULES.cells, RULES.cells), -9.0)
    output[:, 4:6] = 0.5
    for kind, hits in (("car", 0), ("taxi", 1)):
        output[:, :4] = -9
        output[0, OBJECTS.index(kind), 14, 14] = 9
        score = PerceptionObjective(TINY.scenes()).score(network(TINY), output, inputs)
        assert score[:2].tolist() == [[hits, 1], [hits, 1]]


def test_every_split_into_stages_computes_the_same_as_the_full_model() -> None:
    inputs, full = batch(), network()
    expected, _ = full.forward(inputs)
    for split in range(1, SMALL.layers):
        first, second = network(blocks=range(split)), network(blocks=range(split, SMALL.layers))
        stream, _ = first.forward(inputs)
        assert tuple(stream.shape) == first.stream_shape(inputs, tp=1)[1] == second.stream_shape(inputs, tp=1)[0]
        output, _ = second.forward(inputs, stream)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
        names = [name for each in (first, second) for name, _ in each.module.named_parameters()]
        assert sorted(names) == sorted(name for name, _ in full.module.named_parameters())


@pytest.mark.parametrize("preset", PERCEPTION_PRESETS)
def test_the_outline_and_the_module_names_equal_those_of_the_module(preset: str) -> None:
    section = ModelSection(family="perception", preset=preset)
    spec = spec_of(section)
    assert isinstance(spec, PerceptionSpec)
    with torch.device("meta"):
        made = perception_network(spec)
    outline = outline_for(section, DataSection(source="scenes"))
    assert outline.num_parameters == sum(each.numel() for each in made.module.parameters())
    assert outline.layers == spec.layers == len(made.blocks)
    for tower in outline.towers:
        prefix = made.towers[tower.name]
        of_tower = [each for name, each in made.module.named_parameters() if name.startswith(prefix)]
        assert tower.parameters == sum(each.numel() for each in of_tower), tower.name
    real = {name for name, _ in made.module.named_modules() if name}
    # A residual block with equal channels and stride 1 has no `skip`; the extra name does no harm.
    assert {name for name in module_names(spec) if not name.endswith("skip")} <= real <= set(module_names(spec))


def test_saved_weights_are_read_back(tmp_path: Path) -> None:
    made, inputs = network(), batch()
    save_file(dict(made.disk_tensors()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(made.disk_config()))
    spec = spec_of(ModelSection(family="perception", path=str(tmp_path)))
    assert spec == replace(SMALL, name=tmp_path.name)
    assert isinstance(spec, PerceptionSpec)
    read = perception_network(spec)
    read.load(tmp_path)
    assert torch.equal(read.forward(inputs)[0], made.forward(inputs)[0])
    wrong = perception_network(replace(SMALL, hidden=32))
    with pytest.raises(UserError) as caught:
        wrong.load(tmp_path)
    assert caught.value.code == "M021"


def test_user_errors_are_refused(tmp_path: Path) -> None:
    from_folder = ModelSection(family="perception", path=str(tmp_path))
    sections = [
        (from_folder, "M040"),
        (ModelSection(family="perception", preset="giant"), "M001"),
        (ModelSection(family="perception", shape={"camera": 4}), "M008"),
        (ModelSection(family="perception", shape={"cameras": 2}), "M009"),
        (ModelSection(family="perception", shape={"width": 62}), "M009"),
        (ModelSection(family="perception", shape={"heads": 5}), "M009"),
        (ModelSection(family="perception", shape={"camera_widths": []}), "M009"),
    ]
    for section, code in sections:
        with pytest.raises(UserError) as caught:
            spec_of(section)
        assert caught.value.code == code
    (tmp_path / "config.json").write_text(json.dumps(perception_config(SMALL) | {"model_type": "llama"}))
    with pytest.raises(UserError, match="llama"):
        spec_of(from_folder)


def test_a_step_has_the_same_scenes_under_every_split_and_number_of_workers() -> None:
    rules = SceneRules(cameras=3, height=8, width=8, cells=6, reach=12.0)

    def scenes(share: DataShare, workers: int = 0) -> dict[int, list[float]]:
        feed, _ = scene_feeds(DataSection(), rules, seed=5, share=share)
        sums: dict[int, list[float]] = {}
        with Loader(feed, start_step=2, steps=3, workers=workers) as loader:
            step = next(loader)
        for micro in range(share.grad_accum):
            inputs = step.micro(micro)
            for row in range(share.micro_batch):
                scene = only(inputs, row)
                number = step.sample_ids[micro * share.micro_batch + row]
                sums[number] = [each.double().sum().item() for _, each in sorted(scene.items()) if each.ndim > 1]
        return sums

    full = scenes(DataShare(rank=0, dp=1, micro_batch=8, grad_accum=1))
    assert len(full) == 8
    assert scenes(DataShare(rank=0, dp=1, micro_batch=2, grad_accum=4), workers=2) == full
    halves = [scenes(DataShare(rank=rank, dp=2, micro_batch=2, grad_accum=2)) for rank in range(2)]
    assert halves[0] | halves[1] == full


def test_held_out_scenes_are_never_trained_on() -> None:
    training, holdout = scene_feeds(DataSection(holdout=0.5), RULES, seed=0, share=ALONE)
    assert holdout is not None
    trained = {each for step in range(50) for each in training.samples(step, [0])}
    assert not trained & {each for step in range(50) for each in holdout.samples(step, [0])}
    assert scene_feeds(DataSection(holdout=0.0), RULES, seed=0, share=ALONE)[1] is None
