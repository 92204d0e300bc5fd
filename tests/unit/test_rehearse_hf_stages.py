"""A rehearsed rank of a Hugging Face model knows the stages of the others: its pipeline was an assertion before."""

from pathlib import Path

from trimaran.core import Mesh, Plan, Recipe
from trimaran.train import stage_facts_of

SMALL = Path(__file__).parents[2] / "recipes" / "case-studies" / "configs" / "gpt-small"


def test_both_ends_of_a_pipeline_have_a_copy_of_the_tied_embedding() -> None:
    recipe = Recipe.model_validate({"model": {"family": "hf", "path": str(SMALL)}, "data": {"seq_len": 64}})
    facts = stage_facts_of(recipe, Plan(mesh=Mesh(tp=2, pp=2)))
    assert (facts.first_trained, facts.tied) == (0, (0, 1))
