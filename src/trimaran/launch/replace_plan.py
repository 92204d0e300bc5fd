"""Replaces the plan or the recipe of a run; the earlier ones are kept as numbered files."""

from itertools import count
from pathlib import Path

from trimaran.core import Plan, Recipe, dump_recipe
from trimaran.run import RunDirectory, dump_plan


def replace_plan(run: RunDirectory, plan: Plan) -> None:
    """Write `plan` as the run's plan, and keep the earlier one as `plan-N.json`."""
    _replace(run.plan, dump_plan(plan))


def replace_recipe(run: RunDirectory, recipe: Recipe) -> None:
    """Write `recipe` as the run's recipe if it differs, and keep the earlier one as `recipe-N.yaml`."""
    if recipe != run.read_recipe():
        _replace(run.recipe, dump_recipe(recipe))


def _replace(path: Path, text: str) -> None:
    old = next(each for number in count() if not (each := path.with_stem(f"{path.stem}-{number}")).exists())
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    old.write_bytes(path.read_bytes())
    draft.replace(path)
