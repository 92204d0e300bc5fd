"""The shipped recipes: they parse, have a plan, and match the JSON Schema for editors."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.model_folders import write_model_tokenizer
from trimaran.app import main
from trimaran.core import Recipe, parse_recipe
from trimaran.machine import parse_cluster
from trimaran.models import VLM_PRESETS, outline_for, spec_of, vlm_to_disk
from trimaran.planner import choose

RECIPES = Path(__file__).parents[2] / "recipes"


FINE_TUNING = ("sft", "lora", "qlora", "continued-pretraining", "vlm-fine-tune")  # with a model on the Hub


@pytest.mark.parametrize(
    "path",
    [each for each in sorted(RECIPES.glob("*.yaml")) if each.stem not in FINE_TUNING],
    ids=lambda path: path.stem,
)
def test_every_recipe_has_a_plan_that_fits_here(path: Path) -> None:
    recipe = parse_recipe(path.read_text(), name=path.name)
    assert recipe.name == path.stem
    outline = outline_for(recipe.model, recipe.data)
    plan = choose(recipe, spec_of(recipe.model), parse_cluster(recipe.cluster), outline)
    assert plan.global_batch == recipe.train.global_batch
    assert plan.prediction is not None
    assert plan.prediction.fits


@pytest.mark.parametrize("name", FINE_TUNING)
def test_every_recipe_for_fine_tuning_passes_the_dry_run_with_a_local_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "vlm-fine-tune":
        Path("model").mkdir()
        Path("model/config.json").write_text(json.dumps(vlm_to_disk(VLM_PRESETS["tiny"])))
    else:
        config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=8192)  # fmt: skip
        config.save_pretrained("model")
        write_model_tokenizer(Path("model"), "qwen2.5")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello " * 30}]
    Path("data.jsonl").write_text("\n".join([json.dumps({"messages": turns, "text": "hello " * 30})] * 100))
    local = ["--set", "model.path=model", "--set", "data.path=data.jsonl", "--set", "cluster=1xH100"]
    limits = ["--set", "data.seq_len=2048"] if name == "vlm-fine-tune" else []
    assert main(["train", str(RECIPES / f"{name}.yaml"), "--dry-run", "--json", *local, *limits]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prediction"]["fits"]
    text = (RECIPES / f"{name}.yaml").read_text()
    assert parse_recipe(text, name=name).name == name
    assert text.count("# ") > 10


def test_the_shipped_schema_is_up_to_date() -> None:
    shipped = json.loads((RECIPES / "recipe.schema.json").read_text())
    assert shipped == Recipe.model_json_schema(), "run: trimaran schema > recipes/recipe.schema.json"
