"""A run and its object store: a new run does not share one with another, and a run can be resumed from it alone."""

from pathlib import Path
from typing import TYPE_CHECKING

from trimaran.app.recipe.options import RUNS, program_name
from trimaran.core import Plan, Recipe, UserError, parse_recipe
from trimaran.runs import RunDirectory, create_run, holds_run, open_run

if TYPE_CHECKING:  # numpy is not needed for a run without a store
    from trimaran.checkpoint.manifest import Manifest
    from trimaran.checkpoint.store.object_store import ObjectStore


def is_store_url(run: str) -> bool:
    """Return whether a command was given a store instead of a run directory."""
    return "://" in run


def refuse_occupied_store(recipe: Recipe, *, must_reach: bool = True) -> None:
    """Raise if the store of a new run has checkpoints of another, or cannot be used.

    Without `must_reach`, one that cannot be used from here is left to the ranks.
    """
    url = recipe.checkpoint.store
    if not url:
        return
    from trimaran.checkpoint.store.object_store import StoreError, open_store, unusable_store

    try:
        steps = [each for each in open_store(url).steps() if each.complete]
    except StoreError as error:
        if must_reach:
            raise unusable_store(url, str(error)) from None
        return
    except UserError:
        if must_reach:
            raise
        return
    if steps:
        what = f"this store already has checkpoints of a run, the newest of step {steps[-1].step}"
        raise UserError("K062", what, where=f"checkpoint.store ({url})",
                        fix=f"continue that run: `{program_name()} resume {url}`, or use another: "
                        f"--set checkpoint.store={url}-2")  # fmt: skip


def open_stored_run(url: str, run_dir: Path | None) -> RunDirectory:
    """Return a run directory for the run in a store: a new one, with the recipe and plan of its newest checkpoint.

    A run directory that was made from this store before is used again.
    """
    manifest = newest_manifest(url)
    recipe = parse_recipe(manifest.recipe, name=f"the recipe in {url}")
    path = run_dir or RUNS / recipe.name
    if run_dir is None:
        taken = (each for each in (path, *(RUNS / f"{recipe.name}-{number}" for number in range(2, 10_000))))
        path = next(each for each in taken if not each.exists() or _belongs_to(each, url))
    if _belongs_to(path, url):
        return open_run(path)
    section = recipe.checkpoint.model_copy(update={"store": url})
    return create_run(path, recipe.model_copy(update={"checkpoint": section}), Plan.model_validate(manifest.plan))


def newest_manifest(url: str) -> "Manifest":
    """Return the manifest of the newest checkpoint in a store that can be read. Raises UserError if there is none."""
    from trimaran.checkpoint.store.object_store import StoreError, open_store, unusable_store

    store = open_store(url)
    try:
        names = [each.name for each in store.steps() if each.complete]
        for name in reversed(names):
            if (manifest := _manifest(store, name)) is not None:
                return manifest
    except StoreError as error:
        raise unusable_store(url, str(error)) from None
    why = "none of its manifests is intact" if names else "it has no complete checkpoint"
    raise UserError("K028", f"there is nothing to resume in this store: {why}", where=url,
                    fix="check the URL; it is checkpoint.store of the run")  # fmt: skip


def _manifest(store: "ObjectStore", name: str) -> "Manifest | None":
    from trimaran.checkpoint.manifest import DamagedError

    try:
        return store.read_manifest(name)[0]
    except DamagedError:
        return None


def _belongs_to(path: Path, url: str) -> bool:
    return holds_run(path) and open_run(path).read_recipe().checkpoint.store == url.rstrip("/")
