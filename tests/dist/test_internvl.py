"""InternVL-26B in small trains under the plan of its case study as one process does."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.parity import assert_same_trajectory, plan_for, train_trajectory
from tests.unit.test_nets_internvl import add_tokenizer, chat_folder
from trimaran.core import Plan, Recipe, parse_recipe
from trimaran.machine import parse_cluster
from trimaran.models import VlmSpec, outline_for, spec_of
from trimaran.planner import Question, check_plan, search

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL, LARGE = RECIPES / "vlm-internvl-tiny.yaml", RECIPES / "case-studies" / "vlm-26b-train-8xh100.yaml"


def recipe_in(path: Path) -> Recipe:
    return parse_recipe(path.read_text(), name=path.stem)


@pytest.mark.slow
def test_the_shrunk_model_has_what_is_awkward_to_split_and_the_plan_of_the_large_one() -> None:
    shrunk, large = recipe_in(SMALL), recipe_in(LARGE)
    small_spec, spec = spec_of(shrunk.model), spec_of(large.model)
    assert isinstance(small_spec, VlmSpec)
    assert isinstance(spec, VlmSpec)
    assert small_spec.vision.heads == spec.vision.heads == 25
    assert small_spec.vision.block == spec.vision.block
    assert small_spec.vocab % 2 == spec.vocab % 2 == 1
    cluster = parse_cluster("8xH100")
    outline = outline_for(large.model, large.data)
    plan = search(Question(recipe=large, spec=spec, outline=outline, cluster=cluster)).ranked[0]
    check_plan(plan, large, spec, cluster)
    assert isinstance(shrunk.plan, Plan)
    assert (plan.mesh.tp, plan.sharding, plan.recompute) == (2, shrunk.plan.sharding, shrunk.plan.recompute)
    assert plan.mesh.dp_shard == 4
    settings = [{name: (own.tp, own.recompute) for name, own in each.towers.items()} for each in (plan, shrunk.plan)]
    assert settings[0] == settings[1]


@pytest.mark.slow
def test_a_published_folder_trains_alike_on_every_axis_and_is_written_in_its_own_layout(tmp_path: Path) -> None:
    folder, runs, images = (tmp_path / name for name in ("model", "runs", "images"))
    for each in (folder, runs, images):
        each.mkdir()
    _, tensors = chat_folder(folder, "internlm2")
    add_tokenizer(folder, "added_tokens.json")
    random = np.random.default_rng(0)
    for number in range(12):
        size = (*random.integers(10, 50, 2).tolist(), 3)
        Image.fromarray(random.integers(0, 256, size, dtype=np.uint8)).save(images / f"{number:02d}.png")
        (images / f"{number:02d}.txt").write_text(f"image {number}")
    recipe = Recipe.model_validate({
        "model": {"family": "vlm", "path": str(folder)},
        "data": {"source": "image-folder", "path": str(images), "seq_len": 128, "holdout": 0, "tokenizer": "bytes"},
        "train": {"steps": 3, "global_batch": 4, "lr": 1e-3, "sample": {"tokens": 0}, "optimizer": {"eps": 1e-3}},
    })  # fmt: skip
    expected = train_trajectory(recipe, plan_for(recipe, grad_accum=1), runs)
    assert expected.weights.keys() == tensors.keys()
    for mesh in ({"dp_shard": 2}, {"tp": 2}, {"pp": 2}):
        towers = {"vision": {"tp": 1}} if "tp" in mesh else {}  # its heads are normalised together
        plan = plan_for(recipe, grad_accum=2, towers=towers, **mesh)
        assert_same_trajectory(train_trajectory(recipe, plan, runs), expected)
    written = json.loads((runs / "0" / "model" / "config.json").read_text())
    assert (written["model_type"], written["template"]) == ("internvl_chat", "internvl2_5")
    assert (runs / "0" / "model" / "configuration_internvl_chat.py").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, {"tp": 2}], ids=str)
def test_the_shrunk_model_trains_as_one_process_does(tmp_path: Path, mesh: dict[str, int]) -> None:
    tree = recipe_in(SMALL).model_dump(exclude_unset=True)
    random = np.random.default_rng(3)
    with (tmp_path / "chat.jsonl").open("w") as file:
        for number in range(120):
            width, height = random.integers(40, 150, 2).tolist()
            image = tmp_path / f"{number}.png"
            Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(image)
            turns = [{"role": "user", "content": f"<image>which number? {number}"},
                     {"role": "assistant", "content": f"{number} " * (1 + number % 5)}]  # fmt: skip
            file.write(json.dumps({"messages": turns, "images": [str(image)]}) + "\n")
    settings = {"steps": 6, "evaluate": {"batches": 0}, "sample": {"tokens": 0}, "optimizer": {"eps": 1e-3}}
    data = {"source": "chat", "path": str(tmp_path / "chat.jsonl"), "seq_len": 256}
    recipe = Recipe.model_validate(tree | {"data": data, "train": tree["train"] | settings, "plan": "auto"})
    (tmp_path / "runs").mkdir()
    expected = train_trajectory(recipe, plan_for(recipe, grad_accum=1), tmp_path / "runs")
    towers = tree["plan"]["towers"]
    if "dp_shard" not in mesh:
        towers = {name: own | {"sharding": "parameters"} for name, own in towers.items()}
    plan = plan_for(recipe, grad_accum=2, recompute="selective", towers=towers, **mesh)
    assert_same_trajectory(train_trajectory(recipe, plan, tmp_path / "runs"), expected)
    assert expected.losses[-1] < 0.98 * expected.losses[0], "the loss must fall, or the comparison proves nothing"
