"""The environment of processes that tests start."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(**own: str) -> dict[str, str]:
    """Return this process's environment updated with `own`, for a process that may start in another folder.

    The repository comes first in PYTHONPATH, then the existing entries, all absolute. So the process finds the tests
    and the package in any folder.
    """
    entries = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    paths = [str(ROOT), *(str(Path(each).absolute()) for each in entries)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))} | own
