"""The shipped recipes: they parse, have a plan, and match the JSON Schema for editors."""

import json
from pathlib import Path

import pytest

from trimaran.core import Recipe, parse_recipe
from trimaran.hardware import parse_cluster
from trimaran.models import outline_for, spec_of
from trimaran.planner import choose

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_has_a_plan_that_fits_here(path: Path) -> None:
    recipe = parse_recipe(path.read_text(), name=path.name)
    assert recipe.name == path.stem
    outline = outline_for(recipe.model, recipe.data)
    plan = choose(recipe, spec_of(recipe.model), parse_cluster(recipe.cluster), outline)
    assert plan.global_batch == recipe.train.global_batch
    assert plan.prediction is not None
    assert plan.prediction.fits


def test_the_shipped_schema_is_up_to_date() -> None:
    shipped = json.loads((RECIPES / "recipe.schema.json").read_text())
    assert shipped == Recipe.model_json_schema(), "run: trimaran schema > recipes/recipe.schema.json"
