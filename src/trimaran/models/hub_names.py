"""Names of repositories on the Hugging Face Hub, and the error for one that cannot be fetched."""

import errno
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimaran.core import UserError, closest, expand_user, templated

HUB_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")
SNAPSHOT = re.compile(
    r"^(?P<cache>.*)/(?:models|datasets)--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<sha>[^/]+)"
)
MAX_LISTED = 2000  # entries of a folder that are compared with a misspelt name


def is_hub_name(path: str) -> bool:
    """Return whether `path` names a repository, such as Qwen/Qwen2.5-0.5B, and not a file or folder here.

    A path whose first folder exists here is a path: a misspelt name in it is reported, not looked up on the Hub.
    """
    return HUB_NAME.match(path) is not None and not Path(path).exists() and not Path(path).parent.is_dir()


def near_folder(path: str) -> str:
    """Return an existing path that is spelt nearly like `path`, part by part; empty if there is none."""
    named = expand_user(path)
    found = Path(named.anchor) if named.is_absolute() else Path()
    for part in named.parts[1:] if named.is_absolute() else named.parts:
        if (found / part).exists():
            found /= part
            continue
        try:
            names = [each.name for each, _ in zip(found.iterdir(), range(MAX_LISTED), strict=False)]
        except OSError:
            return ""
        if not (near := closest(part, names, cutoff=0.7)):
            return ""
        found /= near
    text = str(found)
    return f"./{text}" if path.startswith("./") and not text.startswith(".") else text


def hub_repo_of(path: Path | str) -> tuple[str, str] | None:
    """Return the name and the revision of a folder in the Hub's cache; None for any other folder."""
    found = SNAPSHOT.match(str(path))
    return (f"{found['owner']}/{found['name']}", found["sha"]) if found else None


def hub_cache_of(path: Path | str) -> Path | None:
    """Return the root of the Hub's cache that holds the folder; None if it is not in such a cache."""
    found = SNAPSHOT.match(str(path))
    return Path(found["cache"]) if found else None


def repo_name(folder: Path) -> str:
    """Return what people call the model in `folder`: the name of the folder, or of the repository that it is from."""
    repo = hub_repo_of(folder.absolute())
    return repo[0].rpartition("/")[2] if repo else folder.resolve().name


RepoKind = Literal["model", "dataset"]
CODES: dict[RepoKind, str] = {"model": "M041", "dataset": "T064"}
NO_NETWORK_TYPES = frozenset({  # of requests, httpx and huggingface_hub
    "RequestException", "TransportError", "LocalEntryNotFoundError", "OfflineModeIsEnabled",
    "CachedRepoTreeNotFoundError", "IncompleteSnapshotError", "ConnectionError", "TimeoutError", "gaierror",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepo:
    """A repository that a recipe names: `field` is the recipe's field, `revision` a branch, a tag or a commit."""

    kind: RepoKind
    name: str
    revision: str | None = None

    @property
    def field(self) -> str:
        return "model.path" if self.kind == "model" else "data.path"

    @property
    def download_command(self) -> str:
        """The command that fetches it into a folder, on a machine that can reach the Hub."""
        words = ["hf", "download", self.name]
        words += ["--repo-type", "dataset"] if self.kind == "dataset" else []
        words += ["--revision", self.revision] if self.revision else []
        return shlex.join([*words, "--local-dir", self.local_folder])

    @property
    def local_folder(self) -> str:
        return f"./{self.name.rpartition('/')[2]}"


def hub_error(error: Exception, repo: HubRepo, *, is_offline: bool) -> UserError:
    """Return the error to raise for what huggingface_hub, or the connection below it, raised."""
    # By name: requests and httpx have types of their own, and only one of them is installed.
    names = {each.__name__ for each in type(error).__mro__}
    elsewhere = templated(
        "where the Hub can be reached run `{download_command}`, copy the folder here, and set {repo}={local_folder}",
        download_command=repo.download_command,
        repo=repo.field,
        local_folder=repo.local_folder,
    )
    address = f"https://huggingface.co/{'datasets/' if repo.kind == 'dataset' else ''}{repo.name}"
    if "GatedRepoError" in names:
        what = templated(
            "the {repo} {repo_name} is gated: its owner must give you access", repo=repo.kind, repo_name=repo.name
        )
        fix = templated(
            "accept the conditions on {address}, then `hf auth login`; or {elsewhere}",
            address=address,
            elsewhere=elsewhere,
        )
    elif "RevisionNotFoundError" in names:
        what, fix = (
            templated("{repo} has no revision '{revision}'", repo=repo.name, revision=repo.revision),
            "name a branch, a tag or a commit of it, or none",
        )
    elif "RepositoryNotFoundError" in names:
        what = templated("the Hub has no {repo} {repo_name} that you may read", repo=repo.kind, repo_name=repo.name)
        fix = templated("check the name on {address}; for a private one: `hf auth login`", address=address)
    elif getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        what = templated("the disk is full: {repo} could not be fetched completely", repo=repo.name)
        fix = "free disk space and start again, which continues the download; or set HF_HOME to a larger disk"
    elif is_offline:
        what, fix = (
            templated("{repo} is not in the local cache, and HF_HUB_OFFLINE is set", repo=repo.name),
            templated("unset it, or {elsewhere}", elsewhere=elsewhere),
        )
    elif "HfHubHTTPError" not in names and names & NO_NETWORK_TYPES:
        what, fix = templated("{repo} is not a folder here, and the Hub cannot be reached", repo=repo.name), elsewhere
    else:
        reason = " ".join(str(error).split())[:300]
        what, fix = (
            templated(
                "the Hub did not give {repo}: {kind}: {reason}",
                repo=repo.name,
                kind=type(error).__name__,
                reason=reason,
            ),
            elsewhere,
        )
    if near := near_folder(repo.name):
        what += templated(" (did you mean the folder '{near}'?)", near=near)
    return UserError(CODES[repo.kind], what, where=f"{repo.field} {repo.name}", fix=fix)
