"""`python -m trimaran.train RUN_DIR`: one rank, as the launcher starts it."""

import os
import sys
from pathlib import Path

# Everything this rank says, the crash of an import or of the C++ below included, goes to its own log.
_RUN = Path(sys.argv[1])
_LOG = os.open(_RUN / "logs" / f"rank-{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
os.dup2(_LOG, 1)
os.dup2(_LOG, 2)

import ctypes  # noqa: E402
import faulthandler  # noqa: E402
import logging  # noqa: E402
import signal  # noqa: E402

from trimaran.data import cache_folder  # noqa: E402
from trimaran.run import open_run  # noqa: E402
from trimaran.run.compile_cache import compile_cache  # noqa: E402
from trimaran.train.process.rank_info import read_rank_info  # noqa: E402
from trimaran.train.worker import run_worker  # noqa: E402

PR_SET_PDEATHSIG = 1  # of Linux's prctl.h


def main() -> int:
    faulthandler.enable()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # an agent that was killed must not leave orphans
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    os.environ.update(compile_cache(os.environ))
    return run_worker(open_run(_RUN), read_rank_info(os.environ), cache=cache_folder(os.environ))


if __name__ == "__main__":
    sys.exit(main())
