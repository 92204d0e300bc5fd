"""Data that does not fit the model is refused before anything starts."""

import io
from pathlib import Path

import pytest
from PIL import Image

from trimaran.app import main, read_plan_request
from trimaran.core import DataSection, ModelSection, Plan, Recipe, UserError
from trimaran.data import data_kind_of, prepare_samples
from trimaran.models import VLM_PRESETS, recipe_image_rules, spec_of
from trimaran.runs import create_run


def png(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize(("family", "source"), [("decoder", "scenes"), ("vlm", "scenes"), ("perception", "shapes")])
def test_only_perception_models_train_on_scenes(family: str, source: str) -> None:
    recipe = Recipe.model_validate({"model": {"family": family}, "data": {"source": source}})
    with pytest.raises(UserError, match=f"the family {family} cannot be trained on {source}") as stopped:
        data_kind_of(recipe)
    assert stopped.value.code == "T052"


def test_scenes_cannot_be_part_of_a_mixture() -> None:
    mixture = [{"name": "talk", "source": "chat", "path": "talk.jsonl"}]
    fields = {"model": {"family": "perception"}, "data": {"source": "scenes", "mixture": mixture}}
    with pytest.raises(UserError, match="scenes cannot be part of a mixture") as stopped:
        data_kind_of(Recipe.model_validate(fields))
    assert stopped.value.code == "T052"


def test_a_perception_model_cannot_generate_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe.model_validate({"model": {"family": "perception"}, "data": {"source": "scenes"}})
    run = create_run(tmp_path / "run", recipe, Plan())
    assert main(["generate", str(run.path)]) == 2
    assert capsys.readouterr().err.startswith("A016")


def test_shapes_are_refused_for_a_model_without_images_before_any_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="this model takes no images") as stopped:
        prepare_samples(DataSection(source="shapes"), rules=None, cache=tmp_path)
    assert stopped.value.code == "T051"
    assert not list(tmp_path.iterdir())


def test_an_extreme_aspect_ratio_is_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "strip.png").write_bytes(png(402, 2))
    (tmp_path / "strip.txt").write_text("a bar")
    rules = recipe_image_rules(Recipe.model_validate({"model": {"family": "vlm"}, "data": {"source": "shapes"}}))
    data = DataSection(source="image-folder", path=str(tmp_path))
    with pytest.raises(UserError, match="402 x 2 pixels, one side is more than 200 times the other"):
        prepare_samples(data, rules=rules, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("family", "preset", "other"), [("decoder", "qwen2-vl-7b", "vlm"), ("vlm", "qwen3-8b", "decoder")]
)
def test_a_preset_of_another_family_names_that_family(family: str, preset: str, other: str) -> None:
    with pytest.raises(UserError, match=f"'{preset}' belongs to the family {other}") as stopped:
        spec_of(ModelSection.model_validate({"family": family, "preset": preset}))
    assert stopped.value.code == "M001"
    assert stopped.value.fix.startswith(f"set model.family to {other}")


def test_a_vision_language_preset_needs_only_its_name() -> None:
    asked = read_plan_request("qwen2-vl-7b", {"cluster": "8xH100"}, [])
    assert asked.settings[:2] == ("model.family=vlm", "model.preset=qwen2-vl-7b")
    assert asked.question.spec == VLM_PRESETS["qwen2-vl-7b"]
