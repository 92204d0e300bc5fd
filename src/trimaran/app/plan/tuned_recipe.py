"""Writes the recipe of a tuning: the user's own, with the best plan pinned."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trimaran.core import Plan, Recipe, UserError
from trimaran.core.regular_files import read_regular_bytes, write_atomically
from trimaran.planner.measure.run_index import pins_of
from trimaran.planner.measure.trial_record import TuneCandidate

HEADER = "# Written by `trimaran tune`"
MAX_HEADER_BYTES = 1 << 10


def refuse_other_file(path: Path) -> None:
    """Raise, before anything is measured, if the file cannot be written, or exists and no tuning has written it."""
    try:
        exists = path.is_symlink() or path.exists()
        if exists and not read_regular_bytes(path, limit_bytes=MAX_HEADER_BYTES).startswith(HEADER.encode()):
            raise UserError("A026", "this file exists, and `trimaran tune` has not written it", where=str(path),
                            fix="name another file with --out")  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError("A026", f"the recipe cannot be written: {error.strerror}", where=str(path),
                        fix="name another file with --out") from None  # fmt: skip


def tuned_recipe_text(recipe: Recipe, best: TuneCandidate, *, remark: str) -> str:
    """Return the fields that the user has set as YAML, with every field of the plan pinned."""
    data = {"workers": best.workers} if best.workers != recipe.data.workers else {}
    return pinned_recipe_text(recipe, best.plan, header=f"{HEADER}: {remark}", data=data)


def pinned_recipe_text(recipe: Recipe, plan: Plan, *, header: str, data: Mapping[str, Any] | None = None) -> str:
    """Return the fields that the user has set as YAML, with every field of the plan pinned, and `data` changed."""
    tree: dict[str, Any] = recipe.model_dump(mode="json", exclude_unset=True, exclude={"plan"})
    if data:
        tree.setdefault("data", {}).update(data)
    tree = _without_empty(tree) | {"plan": pins_of(plan)}
    return f"{header}\n{yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)}"


def _without_empty(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree without fields that say nothing. Where paths are made absolute, missing ones are set to null."""
    smaller = {name: _without_empty(each) if isinstance(each, dict) else each for name, each in tree.items()}
    return {name: each for name, each in smaller.items() if each not in (None, [], {})}


def write_tuned_recipe(path: Path, text: str) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text, mode=0o644)
