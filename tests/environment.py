"""The environment of processes that tests start, and where they find prepared data."""

import os
from pathlib import Path

from trimaran.data import cache_folder

ROOT = Path(__file__).parents[1]
SESSION_CACHE = "TRIMARAN_TESTS_CACHE"  # of commands: it has rates, as a busy CPU would be measured again and again
CACHE = cache_folder(os.environ)  # the user's: packing the default text again would take each test a second


def environment(**own: str) -> dict[str, str]:
    """Return this process's environment updated with `own`, for a process that may start in another folder.

    The repository comes first in PYTHONPATH, then the existing entries, all absolute. So the process finds the tests
    and the package in any folder. It has one thread, and no variable of pytest or one that MLflow sets when a test
    imports it: runs of equal environments share a warm fork server. Commands have a cache of this session.
    """
    entries = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    paths = [str(ROOT), *(str(Path(each).absolute()) for each in entries)]
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MLFLOW_"))}
    cache = {"TRIMARAN_CACHE": os.environ[SESSION_CACHE]} if SESSION_CACHE in os.environ else {}
    return cache | outer | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"} | own
