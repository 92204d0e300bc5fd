"""`python -m trimaran.train RUN`: runs one rank of an existing run in this process, without a supervisor.

For debugging and for tests on a GPU. The rank is RANK of WORLD_SIZE in the environment; its output goes to its log in
RUN. `trimaran train` does not use it: its ranks are forked by `train/process/fork_server.py`.
"""

import os
import sys
from pathlib import Path

from trimaran.core import open_regular_fd

# Redirect before the other imports, so that the log also holds the error of a failed import.
_RUN = Path(sys.argv[1])
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_LOG = open_regular_fd(_RUN / "logs" / f"rank-{os.environ['RANK']}.log", _FLAGS, mode=0o644)
os.dup2(_LOG, 1)
os.dup2(_LOG, 2)

import faulthandler  # noqa: E402
import logging  # noqa: E402

from trimaran.data import cache_folder  # noqa: E402
from trimaran.runs import open_run  # noqa: E402
from trimaran.runs.compile_cache import compile_cache  # noqa: E402
from trimaran.train.process.rank_setup import read_rank_info  # noqa: E402
from trimaran.train.worker import run_worker  # noqa: E402


def main() -> int:
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    os.environ.update(compile_cache(os.environ))
    rank_info, cache = read_rank_info(os.environ), cache_folder(os.environ)
    return run_worker(open_run(_RUN), rank_info, cache=cache, environment=os.environ)


if __name__ == "__main__":
    sys.exit(main())
