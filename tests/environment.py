"""The environment that tests give to processes of their own."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(**own: str) -> dict[str, str]:
    """Return this process's environment with `own` on top, for a process that may start in another folder.

    Tests and the package are found there as they are here: the repository comes first in PYTHONPATH, then what was in
    it, and none of it is relative.
    """
    known = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    paths = [str(ROOT), *(str(Path(each).absolute()) for each in known)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))} | own
