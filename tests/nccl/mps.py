"""CUDA's Multi-Process Service, with which the kernels of several processes run at the same time on one GPU.

Without it, ranks that wait in a collective take turns with those they wait for: 47 s for a row of 8 ranks, with it 19 s
(H200, 2026-11-16). A process that crashes may take others with it, so only the section `parity` uses it.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def mps_server(folder: Path) -> Iterator[bool]:
    """Start the service for processes that start inside `with`; yields whether it runs. Does nothing without it."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-logs")}
    if shutil.which(CONTROL) is None:
        yield False
        return
    for each in variables.values():
        Path(each).mkdir(exist_ok=True)
    os.environ |= variables
    runs = subprocess.run([CONTROL, "-d"], check=False).returncode == 0
    try:
        yield runs
    finally:
        if runs:
            subprocess.run([CONTROL], input="quit\n", text=True, check=False, stdout=subprocess.DEVNULL)
        for name in variables:
            del os.environ[name]
