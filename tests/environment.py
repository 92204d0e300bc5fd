"""The environment of processes that tests start, and where they find prepared data."""

import os
from pathlib import Path

from trimaran.data import cache_folder

ROOT = Path(__file__).parents[1]
CACHE = cache_folder(os.environ)  # the user's: packing the default text again would take each test a second


def environment(**own: str) -> dict[str, str]:
    """Return this process's environment updated with `own`, for a process that may start in another folder.

    The repository comes first in PYTHONPATH, then the existing entries, all absolute. So the process finds the tests
    and the package in any folder.
    """
    entries = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    paths = [str(ROOT), *(str(Path(each).absolute()) for each in entries)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))} | own
