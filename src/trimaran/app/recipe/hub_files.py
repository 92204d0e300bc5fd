"""Replaces names on the Hugging Face Hub in a recipe by local folders, which are fetched if they are missing.

The recipe of a run has the folders and the commits, so a resumed run uses exactly the same files.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trimaran.core import DataSection, MixtureSource, ModelSection, Recipe, UserError
from trimaran.core.plugins import SOURCES
from trimaran.models import hub_repo_of, is_hub_name
from trimaran.models.hub_files import fetch_dataset, fetch_model, fetch_small_files, restore_missing_files
from trimaran.models.hub_names import HubRepo

TEXT_SOURCES = ("text", "jsonl")
FILE_SOURCES = ("python-stdlib", "shapes", "scenes", "megatron", "nanogpt")  # a path is never a name on the Hub


def with_local_model(recipe: Recipe, *, only_config: bool = False) -> Recipe:
    """Return the recipe with a local folder instead of a model's name: its config and tokenizer, or only its config."""
    model = recipe.model
    if model.path and hub_repo_of(model.path) and not Path(model.path).exists():
        restore_missing_files(recipe)  # the recipe of a run whose cache was deleted
    if not model.path or not is_hub_name(model.path):
        return recipe
    repo = HubRepo(kind="model", name=model.path, revision=model.revision)
    folder = fetch_small_files(repo, only_config=only_config, code=model.trust_remote_code)
    return recipe.model_copy(update={"model": _at(model, folder)})


def has_hub_data(recipe: Recipe) -> bool:
    """Return whether the recipe names a dataset on the Hub. Raises if its source only reads files."""
    return any(_is_on_hub(section) for section in (recipe.data, *recipe.data.mixture))


def with_local_files(recipe: Recipe, *, weights: bool = True) -> Recipe:
    """Return the recipe with local folders for its datasets, and fetch the weights of a model from the Hub."""
    repo = hub_repo_of(recipe.model.path) if recipe.model.path else None
    if weights and repo and recipe.model.revision:
        _fetch_weights(recipe.model, HubRepo(kind="model", name=repo[0], revision=repo[1]))
    data = _local_source(recipe.data)
    mixture = tuple(_local_source(source) for source in recipe.data.mixture)
    if data is recipe.data and mixture == recipe.data.mixture:
        return recipe
    return recipe.model_copy(update={"data": data.model_copy(update={"mixture": mixture})})


def _fetch_weights(model: ModelSection, repo: HubRepo) -> None:
    from trimaran.app.show.clean_console import open_console, print_plain
    from trimaran.app.show.progress_bar import progress_bar

    console = open_console(stderr=True)
    with progress_bar(console) as progress:
        folder = fetch_model(repo, partial(progress, f"fetching {repo.name}"), code=model.trust_remote_code)
    print_plain(console, f"model {repo.name}, commit {folder.name}")


def _at(model: ModelSection, folder: Path) -> ModelSection:
    return model.model_copy(update={"path": str(folder), "revision": folder.name})


Section = TypeVar("Section", DataSection, MixtureSource)


def _is_on_hub(section: DataSection | MixtureSource) -> bool:
    if not section.path or not is_hub_name(section.path) or section.source in FILE_SOURCES:
        return False
    if section.source not in SOURCES:  # a plug-in reads what it is given
        return False
    if section.source in TEXT_SOURCES:
        raise UserError("T064", f"{section.path} is a dataset on the Hub, and the source {section.source} reads files",
                        where="data.source", fix="set data.source to datasets for text, or to chat")  # fmt: skip
    return True


def _local_source(section: Section) -> Section:
    """Return the section with the folder of a dataset's split. Conversations are then read as Parquet."""
    if not _is_on_hub(section):
        return section
    assert section.path is not None, "it names a dataset"
    from trimaran.app.show.clean_console import open_console, print_plain
    from trimaran.data import cache_folder

    repo = HubRepo(kind="dataset", name=section.path, revision=section.revision)
    console = open_console(stderr=True)
    with console.status(f"fetching {repo.name}"):
        folder = fetch_dataset(repo, cache_folder(os.environ), subset=section.subset, split=section.split)
    print_plain(console, f"dataset {repo.name}, split {section.split}, commit {folder.parts[-3]}")
    source = "datasets" if section.source == "datasets" else "parquet"
    fields: dict[str, Any] = {"path": str(folder), "revision": folder.parts[-3], "source": source}
    return section.model_copy(update=fields)
