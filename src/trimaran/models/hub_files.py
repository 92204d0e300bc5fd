"""Fetches models and datasets of the Hugging Face Hub, and those that the recipe of a run has on another machine.

huggingface_hub reads HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE by itself, continues a download that was
interrupted, and checks what it gets.
"""

import fnmatch
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trimaran.core import Recipe, UserError, templated
from trimaran.models.hub_names import HubRepo, hub_cache_of, hub_error, hub_repo_of

Progress = Callable[[float], None]
"""Is called with the fraction that is there."""

SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
UNWANTED = ("*/*", "consolidated*")  # subfolders hold other formats, and Mistral's repositories the weights twice
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
POLL_SECONDS = 0.2
CONNECT_SECONDS = 10.0


def fetch_small_files(repo: HubRepo, *, only_config: bool = False, code: bool = False) -> Path:
    """Return the folder with the config and the tokenizer of a model, or only its config.json; no weights.

    The last part of the path is the commit. Python files are fetched only with `code`.
    """
    hub = load_hub(repo)
    with hub_errors(repo, hub):
        local = not can_reach(hub)
        if only_config:
            found = hub.hf_hub_download(repo.name, "config.json", revision=repo.revision, local_files_only=local)
            return Path(found).parent
        folder = hub.snapshot_download(
            repo.name,
            revision=repo.revision,
            local_files_only=local,
            allow_patterns=[*SMALL, *(("*.py",) if code else ())],
            ignore_patterns=[*UNWANTED, "*.safetensors"],
        )
        if not (Path(folder) / "config.json").is_file():
            raise UserError("M042.no-config-json", where=f"{repo.field} {repo.name}", repo=repo.name)
        return Path(folder)


def fetch_model(
    repo: HubRepo, progress: Progress | None = None, *, code: bool = False, cache: Path | None = None
) -> Path:
    """Return the local folder of a model: config, tokenizer and safetensors, and Python files only with `code`.

    Without a network, a cached copy with weights is used. `cache` is the root of another cache.
    """
    hub = load_hub(repo)
    wanted = [*SMALL, "*.safetensors", *(("*.py",) if code else ())]
    options: dict[str, Any] = {"allow_patterns": wanted, "ignore_patterns": list(UNWANTED), "cache_dir": cache}
    with hub_errors(repo, hub):
        if can_reach(hub):
            info = hub.HfApi().model_info(repo.name, revision=repo.revision, files_metadata=True)
            sizes = {each.rfilename: each.size or 0 for each in info.siblings}
            files = [name for name in sizes if _matches(name, wanted) and not _matches(name, UNWANTED)]
            if not any(name.endswith(".safetensors") for name in files):  # training would start from random weights
                what = f"{repo.name} has no weights in the format safetensors"
                fix = f"name another model, or {repo.field}=DIR"
                if any(_matches(name, PICKLES) for name in sizes):
                    what = f"{repo.name} has its weights only as pickles, which can run any program"
                    fix = "in a sandbox, load it with transformers and save it as safetensors with save_pretrained"
                raise UserError("M042", what, where=f"{repo.field} {repo.name}", fix=fix)
            root = Path(cache or hub.constants.HF_HUB_CACHE) / f"models--{repo.name.replace('/', '--')}"
            with _watched(root / "blobs", sum(sizes[name] for name in files), progress):
                return Path(hub.snapshot_download(repo.name, revision=info.sha, **options))
        folder = Path(hub.snapshot_download(repo.name, revision=repo.revision, local_files_only=True, **options))
        if any(folder.glob("*.safetensors")):
            return folder
        raise hub.errors.LocalEntryNotFoundError(f"{repo.name} has no weights in the cache")


def _matches(name: str, patterns: Any) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


@contextmanager
def _watched(blobs: Path, total_bytes: int, progress: Progress | None) -> Iterator[None]:
    """Report the progress of a download by the growth of the cache: its own bars write to the terminal."""
    if progress is None or not total_bytes:
        yield
        return
    done = threading.Event()
    before = _bytes_in(blobs)

    def poll() -> None:
        while not done.wait(POLL_SECONDS):
            progress(min(1.0, (_bytes_in(blobs) - before) / total_bytes))

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    try:
        return sum(each.stat().st_size for each in folder.iterdir())
    except OSError:
        return 0


def load_hub(repo: HubRepo) -> Any:
    """Return the module huggingface_hub, without its own progress bars."""
    try:
        # An optional package that takes a moment to import.
        import huggingface_hub.constants  # noqa: PLC0415
        import huggingface_hub.errors  # noqa: PLC0415
        import huggingface_hub.utils  # noqa: PLC0415
    except ImportError:
        raise UserError(
            "M041" if repo.kind == "model" else "T064",
            templated(
                "{repo} is not a folder here, and to fetch it from the Hub the package huggingface_hub is missing",
                repo=repo.name,
            ),
            where=f"{repo.field} {repo.name}",
            fix="pip install 'trimaran[hf]', or name a local folder",
        ) from None
    huggingface_hub.utils.disable_progress_bars()
    return huggingface_hub


def can_reach(hub: Any) -> bool:
    """Return whether something answers at the Hub's address; huggingface_hub itself would retry for half a minute."""
    from urllib.request import getproxies  # noqa: PLC0415  (imports http and ssl)

    address, proxies = urlsplit(hub.constants.ENDPOINT), getproxies()
    if hub.constants.HF_HUB_OFFLINE:
        return False
    if address.scheme in proxies or "all" in proxies:
        return True
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


@contextmanager
def hub_errors(repo: HubRepo, hub: Any) -> Iterator[None]:
    """Raise a UserError for whatever the Hub or the connection raises."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise hub_error(error, repo, is_offline=bool(hub.constants.HF_HUB_OFFLINE)) from error


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
            folder.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            try:
                _load(repo, sha, subset=subset, split=split).to_parquet(str(draft / FILE))
                os.replace(draft, folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
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
        raise UserError(
            "T064.dataset-error", where=f"data.path {repo.name}", repo=repo.name, error=" ".join(str(error).split())
        ) from None


log = logging.getLogger(__name__)


def restore_missing_files(recipe: Recipe) -> None:
    """Fetch the Hub's files of a run that this machine lacks, to the paths of its recipe, which name the commits."""
    model, folder = recipe.model, Path(recipe.model.path or "")
    has_weights = (folder / "config.json").exists() and any(folder.glob("*.safetensors"))
    if model.path and not has_weights and (found := hub_repo_of(model.path)):
        log.info("fetching %s at %s from the Hub", *found)
        repo = HubRepo(kind="model", name=found[0], revision=found[1])
        fetch_model(repo, code=model.trust_remote_code, cache=hub_cache_of(model.path))
    for source in (recipe.data, *recipe.data.mixture):
        folder = Path(source.path or "")
        if source.revision and not (folder / FILE).is_file() and (split := split_of_folder(folder)):
            log.info("fetching %s at %s from the Hub", split[0].name, split[0].revision)
            fetch_dataset(split[0], folder.parents[4], subset=split[1], split=split[2])
