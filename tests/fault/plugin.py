"""Faults inside a rank at a chosen step. The fork server's forks import it if TRIMARAN_TEST_PLUGIN names it.

TRIMARAN_TEST_FAULT is `FAULT:RANK:STEP`: the fault happens when that rank enters that step, counted from 0; with
`:ATTEMPT` after it only in that attempt. Several are separated by commas. TRIMARAN_TEST_PAUSE is added to every step,
in seconds, until the run directory has a file `no-pause`.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trimaran.runs import Section
from trimaran.train import SupervisorLink


def _hang() -> None:
    while True:
        time.sleep(1)


def _run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB (planted)")


def _find_only_holes() -> None:
    """Raise what torch raises if memory is fragmented, unless the allocator has expandable segments."""
    if os.environ.get("PYTORCH_ALLOC_CONF") != "expandable_segments:True":
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 512.00 "
            "MiB is free. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 3.00 GiB is reserved by "
            "PyTorch but unallocated. (planted)"
        )


RUN = Path("/proc/self/fd/1").readlink().parents[1]  # a rank prints to RUN/logs/rank-RANK.log
COMPILE_SECONDS = 8.0
compiled: list[int] = []


def _compile() -> None:
    """Compile something that takes long, as for a new input shape; once in a process."""

    def slow(module: Any, _: Any) -> Any:
        compiled.append(1)
        time.sleep(COMPILE_SECONDS)
        return module.forward

    if not compiled:
        torch.compile(torch.sin, backend=slow)(torch.zeros(2))


FAULTS: dict[str, Callable[[], Any]] = {
    "compile": _compile,
    "exit": lambda: os._exit(0),
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
    "raise": lambda: (_ for _ in ()).throw(ValueError("a planted fault")),
    "oom": _run_out_of_memory,
    "fragmented": _find_only_holes,
}

faults = [each.split(":") for each in os.environ.get("TRIMARAN_TEST_FAULT", "").split(",") if each]
report_section = SupervisorLink.report_section


def pause_seconds() -> float:
    """Return the pause that is added to a step now."""
    return 0.0 if (RUN / "no-pause").exists() else float(os.environ.get("TRIMARAN_TEST_PAUSE", "0"))


def report_section_and_fail(self: SupervisorLink, section: Section, at: int = 0) -> None:
    report_section(self, section, at)
    if section in ("first", "step"):
        time.sleep(pause_seconds())
        for fault, rank, step, *attempt in faults:
            if (rank, step) == (os.environ["RANK"], str(at)) and attempt in ([], [str(self.attempt)]):
                FAULTS[fault]()


SupervisorLink.report_section = report_section_and_fail  # type: ignore[method-assign]
