"""Replaces the plan or the recipe of a run; the earlier ones are kept as numbered files."""

from itertools import count
from pathlib import Path

from trimaran.core import Plan, Recipe, dump_recipe
from trimaran.core.regular_files import read_regular_bytes
from trimaran.run.reserve import write_with_reserve
from trimaran.run.run_directory import RunDirectory, dump_plan


def replace_plan(run: RunDirectory, plan: Plan) -> None:
    """Write `plan` as the run's plan, and keep the earlier one as `plan-N.json`."""
    _replace(run.plan, dump_plan(plan), reserve=run.reserve)


def replace_recipe(run: RunDirectory, recipe: Recipe) -> None:
    """Write `recipe` as the run's recipe if it differs, and keep the earlier one as `recipe-N.yaml`."""
    if recipe != run.read_recipe():
        _replace(run.recipe, dump_recipe(recipe), reserve=run.reserve)


def _replace(path: Path, text: str, *, reserve: Path) -> None:
    old = next(each for number in count() if not (each := path.with_stem(f"{path.stem}-{number}")).exists())
    draft = path.with_name(f".{path.name}.draft")
    write_with_reserve(reserve, lambda: draft.write_text(text, encoding="utf-8"))
    write_with_reserve(reserve, lambda: old.write_bytes(read_regular_bytes(path)))
    draft.replace(path)
