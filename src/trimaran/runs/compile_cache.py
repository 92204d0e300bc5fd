"""Caches that outlive a run: what torch has compiled, and the bytecode of Python."""

import contextlib
import importlib.util
import os
import stat
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile

from trimaran.core import UserError, templated, user_cache

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
FOLDERS = ("inductor", "triton")  # one for each of the two variables


def compile_cache(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that make torch and Triton cache compiled code for the next start.

    The folder is under TRIMARAN_CACHE or the user's cache, one for each version of torch. (torch's default is the
    folder for temporary files, which is lost with the container or at a reboot.) Any number of ranks may share it.
    Variables that the user has set stay. If no folder is writable, or any user can write to it, torch's default stays.
    The variables must be set before the first compilation. The caller passes its environment, because only entry points
    read it.
    """
    folder = compile_folder(environ)
    if folder is None:
        return {}
    ours = {name: str(folder / each) for name, each in zip((INDUCTOR, TRITON), FOLDERS, strict=True)}
    if INDUCTOR in environ:
        del ours[TRITON]  # torch puts it below TORCHINDUCTOR_CACHE_DIR unless it is set
    return {name: path for name, path in ours.items() if name not in environ}


def compile_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the cache folder for this version of torch; None if it is not writable."""
    root = _cache_root(environ)
    if root is None:
        return None
    folder = root / "compile" / f"torch-{version('torch')}"
    folders = [folder / each for each in FOLDERS]
    return folder if all(_writable(each) and not others_can_plant(each) for each in folders) else None


def refuse_unusable(environ: Mapping[str, str], *, kernels: bool = False) -> None:
    """Raise if the user has set a cache folder that cannot be created or written to.

    torch creates its folder when it is imported, so call this before. Triton creates its own only to compile GPU
    `kernels`. The check writes a file: root passes permission checks even where the disk is read-only.
    """
    for name in (INDUCTOR, TRITON) if kernels else (INDUCTOR,):
        if (named := environ.get(name)) is None:
            continue
        try:
            os.makedirs(named, exist_ok=True)
            TemporaryFile(dir=named).close()
        except OSError as error:
            raise UserError(
                "A017.cannot-written",
                where=templated("the environment variable {name}", name=name),
                name=name,
                named=named,
                reason=error.strerror,
            ) from None


def _writable(folder: Path) -> bool:
    existing = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)


PROBED = "torch"  # the largest package, and the one that takes longest


def use_bytecode_cache(environ: Mapping[str, str]) -> bool:
    """Cache bytecode of this process and its forks in our folder, if there is none and Python would write none.

    Else each start compiles the sources of torch, which doubles the time of its import: installers may leave bytecode
    out, and containers set PYTHONDONTWRITEBYTECODE or are read-only. Call it before anything large is imported. Returns
    whether the cache is used.
    """
    found = importlib.util.find_spec(PROBED)
    if found is None or found.origin is None or sys.pycache_prefix is not None:
        return False
    writes_itself = not sys.dont_write_bytecode and os.access(os.path.dirname(found.origin), os.W_OK)
    if writes_itself or os.path.exists(importlib.util.cache_from_source(found.origin)):
        return False
    root = _cache_root(environ)
    with contextlib.suppress(OSError):
        if root is not None and not others_can_plant(folder := root / "bytecode"):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
                return True
    return False


def _cache_root(environ: Mapping[str, str]) -> Path | None:
    root = Path(named) if (named := environ.get("TRIMARAN_CACHE")) else user_cache(environ)
    return root and root.absolute()


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
