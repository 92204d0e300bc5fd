"""A run that goes on with another plan or recipe; the ones before stay beside them."""

from itertools import count
from pathlib import Path

from trimaran.core import Plan, Recipe, dump_recipe
from trimaran.run import RunDirectory, dump_plan


def keep_plan(run: RunDirectory, plan: Plan) -> None:
    """Make `plan` the run's; the one before stays as `plan-N.json`."""
    _keep(run.plan, dump_plan(plan))


def keep_recipe(run: RunDirectory, recipe: Recipe) -> None:
    """Make `recipe` the run's, if it is another one; the one before stays as `recipe-N.yaml`."""
    if recipe != run.read_recipe():
        _keep(run.recipe, dump_recipe(recipe))


def _keep(path: Path, text: str) -> None:
    old = next(each for number in count() if not (each := path.with_stem(f"{path.stem}-{number}")).exists())
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    old.write_bytes(path.read_bytes())
    draft.replace(path)
