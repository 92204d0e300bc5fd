"""Data and models that do not belong together are refused before anything is started, in words that help."""

import io
from pathlib import Path

import pytest
from PIL import Image

from trimaran.app.main import main
from trimaran.app.request.plan_request import ask_about
from trimaran.core import DataSection, ModelSection, Plan, Recipe, UserError
from trimaran.data.data_kind import kind_of
from trimaran.data.samples import prepare_samples
from trimaran.models import VLM_PRESETS, spec_of
from trimaran.models.recipe_images import recipe_image_rules
from trimaran.run import create_run


def png(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize(("family", "source"), [("decoder", "scenes"), ("vlm", "scenes"), ("perception", "shapes")])
def test_scenes_are_for_perception_alone(family: str, source: str) -> None:
    recipe = Recipe.model_validate({"model": {"family": family}, "data": {"source": source}})
    with pytest.raises(UserError, match=f"the family {family} cannot be trained on {source}") as stopped:
        kind_of(recipe)
    assert stopped.value.code == "T052"


def test_scenes_cannot_be_mixed() -> None:
    mixture = [{"name": "talk", "source": "chat", "path": "talk.jsonl"}]
    told = {"model": {"family": "perception"}, "data": {"source": "scenes", "mixture": mixture}}
    with pytest.raises(UserError, match="scenes cannot be mixed") as stopped:
        kind_of(Recipe.model_validate(told))
    assert stopped.value.code == "T052"


def test_a_perception_model_is_not_asked_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe.model_validate({"model": {"family": "perception"}, "data": {"source": "scenes"}})
    run = create_run(tmp_path / "run", recipe, Plan())
    assert main(["generate", str(run.path)]) == 2
    assert capsys.readouterr().err.startswith("A016")


def test_shapes_are_refused_to_a_model_without_eyes_before_one_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="this model does not see") as stopped:
        prepare_samples(DataSection(source="shapes"), rules=None, cache=tmp_path)
    assert stopped.value.code == "T051"
    assert not list(tmp_path.iterdir())


def test_a_strip_is_no_picture_and_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "strip.png").write_bytes(png(402, 2))
    (tmp_path / "strip.txt").write_text("a bar")
    rules = recipe_image_rules(Recipe.model_validate({"model": {"family": "vlm"}, "data": {"source": "shapes"}}))
    data = DataSection(source="image-folder", path=str(tmp_path))
    with pytest.raises(UserError, match="402 x 2 pixels, one side is more than 200 times the other"):
        prepare_samples(data, rules=rules, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("family", "preset", "other"), [("decoder", "qwen2-vl-7b", "vlm"), ("vlm", "qwen3-8b", "decoder")]
)
def test_a_preset_of_another_family_is_told_from_one_that_is_not_there(family: str, preset: str, other: str) -> None:
    with pytest.raises(UserError, match=f"'{preset}' is one of the family {other}") as stopped:
        spec_of(ModelSection.model_validate({"family": family, "preset": preset}))
    assert stopped.value.code == "M001"
    assert stopped.value.fix.startswith(f"set model.family to {other}")


def test_a_model_that_sees_is_asked_about_by_its_name_alone() -> None:
    asked = ask_about("qwen2-vl-7b", {"cluster": "8xH100"}, [])
    assert asked.settings[:2] == ("model.family=vlm", "model.preset=qwen2-vl-7b")
    assert asked.question.spec == VLM_PRESETS["qwen2-vl-7b"]
