"""Names of repositories on the Hugging Face Hub, and how they differ from paths on this machine."""

import re
from pathlib import Path

from trimaran.core.errors import closest
from trimaran.core.regular_files import expand_user

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
