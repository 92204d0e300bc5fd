"""Fetches again what the recipe of a run has on another machine: a node's own copy of a model and of datasets."""

import logging
from pathlib import Path

from trimaran.core import Recipe
from trimaran.models.hub.fetch_dataset import FILE, fetch_dataset, split_of_folder
from trimaran.models.hub.fetch_model import fetch_model
from trimaran.models.hub.hub_errors import HubRepo
from trimaran.models.hub.hub_names import hub_cache_of, hub_repo_of

log = logging.getLogger(__name__)


def restore_missing_files(recipe: Recipe) -> None:
    """Fetch the Hub's files of a run that are not on this machine, to the paths that the run's recipe names.

    A run is created on one machine and may be started on others. The paths name the commits, so every machine gets the
    same files.
    """
    model = recipe.model
    if model.path and (found := hub_repo_of(model.path)) and not _has_weights(Path(model.path)):
        log.info("fetching %s at %s from the Hub", *found)
        repo = HubRepo(kind="model", name=found[0], revision=found[1])
        fetch_model(repo, code=model.trust_remote_code, cache=hub_cache_of(model.path))
    for source in (recipe.data, *recipe.data.mixture):
        folder = Path(source.path or "")
        if source.revision and not (folder / FILE).is_file() and (split := split_of_folder(folder)):
            log.info("fetching %s at %s from the Hub", split[0].name, split[0].revision)
            fetch_dataset(split[0], folder.parents[4], subset=split[1], split=split[2])


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").exists() and any(folder.glob("*.safetensors"))
