"""The user's home directory, and the folder there for files that can be made again."""

from collections.abc import Mapping
from pathlib import Path

from trimaran.core.errors import UserError


def user_cache(environ: Mapping[str, str]) -> Path | None:
    """Return our folder in the user's cache; None if the user has no home directory, as in some containers."""
    try:
        return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimaran"
    except RuntimeError:  # HOME is not set, and the user is not in the password database
        return None


def needed_user_cache(environ: Mapping[str, str]) -> Path:
    """Return our folder in the user's cache; raise UserError if there is none."""
    if (folder := user_cache(environ)) is not None:
        return folder
    raise UserError("A023", "this user has no home directory, where prepared data is cached",
                    where="the environment variable HOME",
                    fix="set TRIMARAN_CACHE, or HOME, to a folder that you may write to")  # fmt: skip


def expand_user(path: str) -> Path:
    """Return the path with a leading `~` expanded, as shells do: a `~name` without such a user stays as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
