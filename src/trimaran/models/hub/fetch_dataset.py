"""Fetches a dataset of the Hugging Face Hub and stores one split of it as Parquet, with `datasets`."""

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from trimaran.core import UserError
from trimaran.models.hub.fetch_model import can_reach, hub_errors, load_hub
from trimaran.models.hub.hub_errors import HubRepo

FILE = "data.parquet"
DEFAULT_SUBSET = "default"
COMMIT = re.compile(r"[0-9a-f]{7,64}")


def dataset_folder(cache: Path, repo: HubRepo, sha: str, *, subset: str | None, split: str) -> Path:
    """Return where a split is stored: the path says name, commit, subset and split."""
    return cache / "hub" / repo.name.replace("/", "--") / sha / (subset or DEFAULT_SUBSET) / split


def split_of_folder(folder: Path) -> tuple[HubRepo, str | None, str] | None:
    """Return the repository, subset and split of a path that `dataset_folder` made; None for any other path."""
    parts = folder.parts[-5:]
    if len(parts) < 5 or parts[0] != "hub" or "--" not in parts[1]:
        return None
    repo = HubRepo(kind="dataset", name=parts[1].replace("--", "/", 1), revision=parts[2])
    return repo, None if parts[3] == DEFAULT_SUBSET else parts[3], parts[4]


def fetch_dataset(repo: HubRepo, cache: Path, *, subset: str | None, split: str) -> Path:
    """Return the folder that holds the split as Parquet. It is complete or absent; the path names the commit."""
    hub = load_hub(repo)
    with hub_errors(repo, hub):
        sha = _commit(hub, repo, cache)
        folder = dataset_folder(cache, repo, sha, subset=subset, split=split)
        if not (folder / FILE).is_file():
            _store(_load(repo, sha, subset=subset, split=split), folder)
    return folder


def _commit(hub: Any, repo: HubRepo, cache: Path) -> str:
    """Return the commit of the revision; without a network, the only one that is stored already."""
    stored = sorted((cache / "hub" / repo.name.replace("/", "--")).glob("*"))
    if repo.revision and any(each.name == repo.revision for each in stored):
        return repo.revision
    if len(stored) == 1 and repo.revision is None and not can_reach(hub):
        return stored[0].name
    sha = str(hub.HfApi().dataset_info(repo.name, revision=repo.revision).sha)
    if not COMMIT.fullmatch(sha):  # it becomes a part of a path
        raise ValueError(f"the Hub answered with the commit {sha[:80]!r}")
    return sha


def _load(repo: HubRepo, sha: str, *, subset: str | None, split: str) -> Any:
    import datasets  # noqa: PLC0415  takes a second to import

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(repo.name, subset, split=split, revision=sha)
    except ValueError as error:  # an unknown split or subset; the message lists those that exist
        raise UserError("T064", f"{repo.name}: {' '.join(str(error).split())}", where=f"data.path {repo.name}",
                        fix="set data.split and data.subset to those of the dataset") from None  # fmt: skip


def _store(rows: Any, folder: Path) -> None:
    """Write the rows beside the folder and rename it, so that no reader sees half of them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        rows.to_parquet(str(draft / FILE))
        os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
