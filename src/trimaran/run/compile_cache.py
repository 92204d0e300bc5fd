"""Where compiled code is kept between runs."""

import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile

from trimaran.core.errors import UserError

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
FOLDERS = ("inductor", "triton")  # for what each of the two compiles


def compile_cache(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make torch and Triton keep what they compile where the next start finds it.

    That is under TRIMARAN_CACHE or in the user's cache, a folder for each version of torch; torch's own choice is the
    folder for temporary files, which a new container or a restart of the machine empties. Any number of ranks may share
    it. A folder that a person has named stays, and without a place to write to torch's own choice does. The environment
    is handed in, because only those who start programs read it; it must be set before the first compilation.
    """
    folder = compile_folder(environ)
    if folder is None:
        return {}
    ours = {name: str(folder / each) for name, each in zip((INDUCTOR, TRITON), FOLDERS, strict=True)}
    if INDUCTOR in environ:
        del ours[TRITON]  # it is a folder in there unless it is named
    return {name: path for name, path in ours.items() if name not in environ}


def compile_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder for what this version of torch compiles; None where nothing can be written."""
    if named := environ.get("TRIMARAN_CACHE"):
        above = Path(named)
    else:
        try:
            above = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimaran"
        except RuntimeError:  # nobody knows where home is
            return None
    folder = above.absolute() / "compile" / f"torch-{version('torch')}"
    return folder if all(_writable(folder / each) for each in FOLDERS) else None


def refuse_unusable(environ: Mapping[str, str], *, kernels: bool = False) -> None:
    """Raise where a person has named a folder for compiled code that cannot be made or written to.

    torch makes its own while it is imported, whether anything is compiled or not, so this comes before that. Triton
    makes its own for `kernels`, those of a GPU. It is tried out: root may do what a disk then does not.
    """
    for name in (INDUCTOR, TRITON) if kernels else (INDUCTOR,):
        if (named := environ.get(name)) is None:
            continue
        try:
            os.makedirs(named, exist_ok=True)
            TemporaryFile(dir=named).close()
        except OSError as error:
            what = f"{name} is '{named}', where nothing can be written: {error.strerror}"
            fix = "name another folder, or unset it: Trimaran has a place of its own"
            raise UserError("A017", what, where=f"the environment variable {name}", fix=fix) from None


def _writable(folder: Path) -> bool:
    """Return whether files can be made in there, once it is made: someone else may have made the folders above it."""
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)
