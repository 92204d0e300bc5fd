"""A cache folder for the bytecode of modules that were installed without it. Only the standard library is imported."""

import importlib.util
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

PROBED = "torch"  # the largest package, and the one that takes longest


def use_bytecode_cache(environ: Mapping[str, str]) -> bool:
    """Have this process and its forks cache bytecode in our folder, if torch has none and Python would write none.

    Some installers leave bytecode out, and containers often have folders that are not writable, or set
    PYTHONDONTWRITEBYTECODE. Each start then compiles the sources of torch again, which doubles the time of its import.
    The folder is under TRIMARAN_CACHE or the user's cache. Python checks each file against its source. Call it before
    anything large is imported. Returns whether the cache is used.
    """
    found = importlib.util.find_spec(PROBED)
    if found is None or found.origin is None or sys.pycache_prefix is not None:
        return False
    if os.path.exists(importlib.util.cache_from_source(found.origin)):
        return False
    if not sys.dont_write_bytecode and os.access(os.path.dirname(found.origin), os.W_OK):
        return False  # Python writes it by itself
    folder = bytecode_folder(environ)
    if folder is None:
        return False
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    return True


def bytecode_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the cache, which exists then; None if it cannot be written to."""
    named, home = environ.get("TRIMARAN_CACHE"), environ.get("XDG_CACHE_HOME")
    try:
        root = Path(named) if named else Path(home or Path.home() / ".cache") / "trimaran"
        folder = root.absolute() / "bytecode"
        if others_can_plant(folder):
            return None
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def others_can_plant(folder: Path) -> bool:
    """Return whether any user of this machine can put files into `folder`: cached code is executed.

    That is so if everybody may write to it or to a folder above it, unless that one is sticky, as /tmp is. In a sticky
    folder another user may have made the next folder first. A folder that a group shares is trusted.
    """
    user, is_sticky = os.geteuid(), False
    for each in (*reversed(folder.parents), folder):
        try:
            found = each.stat()
        except FileNotFoundError:
            return False
        if is_sticky and found.st_uid not in (0, user):
            return True
        is_sticky = bool(found.st_mode & stat.S_ISVTX)
        if found.st_mode & stat.S_IWOTH and (each == folder or not is_sticky):
            return True
    return False
