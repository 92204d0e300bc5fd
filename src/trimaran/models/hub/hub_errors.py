"""The error for a repository that cannot be fetched: why, and the exact command that fetches it elsewhere."""

import errno
import shlex
from dataclasses import dataclass
from typing import Literal

from trimaran.core import UserError
from trimaran.models.hub.hub_names import near_folder

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


def is_unreachable(error: Exception) -> bool:
    """Return whether the Hub did not answer, so that a copy in the cache is the best there is."""
    names = _type_names(error)
    return "HfHubHTTPError" not in names and bool(names & NO_NETWORK_TYPES)


def _type_names(error: Exception) -> set[str]:
    """Return the names of the error's types: requests and httpx have their own, and only one of them is installed."""
    return {each.__name__ for each in type(error).__mro__}


def hub_error(error: Exception, repo: HubRepo, *, is_offline: bool) -> UserError:
    """Return the error to raise for what huggingface_hub, or the connection below it, raised."""
    names = _type_names(error)
    elsewhere = (
        f"where the Hub can be reached run `{repo.download_command}`, copy the folder here, and set "
        f"{repo.field}={repo.local_folder}"
    )
    address = f"https://huggingface.co/{'datasets/' if repo.kind == 'dataset' else ''}{repo.name}"
    if "GatedRepoError" in names:
        what = f"the {repo.kind} {repo.name} is gated: its owner must give you access"
        fix = f"accept the conditions on {address}, then `hf auth login`; or {elsewhere}"
    elif "RevisionNotFoundError" in names:
        what, fix = f"{repo.name} has no revision '{repo.revision}'", "name a branch, a tag or a commit of it, or none"
    elif "RepositoryNotFoundError" in names:
        what = f"the Hub has no {repo.kind} {repo.name} that you may read"
        fix = f"check the name on {address}; for a private one: `hf auth login`"
    elif getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        what = f"the disk is full: {repo.name} could not be fetched completely"
        fix = "free disk space and start again, which continues the download; or set HF_HOME to a larger disk"
    elif is_offline:
        what, fix = f"{repo.name} is not in the local cache, and HF_HUB_OFFLINE is set", f"unset it, or {elsewhere}"
    elif is_unreachable(error):
        what, fix = f"{repo.name} is not a folder here, and the Hub cannot be reached", elsewhere
    else:
        reason = " ".join(str(error).split())[:300]
        what, fix = f"the Hub did not give {repo.name}: {type(error).__name__}: {reason}", elsewhere
    if near := near_folder(repo.name):
        what += f" (did you mean the folder '{near}'?)"
    return UserError(CODES[repo.kind], what, where=f"{repo.field} {repo.name}", fix=fix)
