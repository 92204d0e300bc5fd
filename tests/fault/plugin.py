"""What breaks inside a rank, at a chosen point: imported by the fork server's forks where TRIMARAN_TEST_PLUGIN names it.

TRIMARAN_TEST_FAULT is `FAULT:RANK:STEP`: what happens when that rank's loop comes to that step, counted from 0; with
`:ATTEMPT` behind it only then. Several are separated by commas. TRIMARAN_TEST_PAUSE is what every step takes longer, in
seconds.
"""

import ctypes
import os
import signal
import time
from typing import Any

import torch

from trimaran.run import Section
from trimaran.train.process.supervisor_link import SupervisorLink


def _hang() -> None:
    while True:
        time.sleep(1)


def _run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB (planted)")


COMPILE_SECONDS = 8.0
compiled: list[int] = []


def _compile() -> None:
    """Compile something, which takes long, as a layer does that sees a new shape; once in a process."""

    def slow(module: Any, _: Any) -> Any:
        compiled.append(1)
        time.sleep(COMPILE_SECONDS)
        return module.forward

    if not compiled:
        torch.compile(torch.sin, backend=slow)(torch.zeros(2))


FAULTS = {
    "compile": _compile,
    "exit": lambda: os._exit(0),
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
    "raise": lambda: (_ for _ in ()).throw(ValueError("a planted fault")),
    "oom": _run_out_of_memory,
}

plans = [each.split(":") for each in os.environ.get("TRIMARAN_TEST_FAULT", "").split(",") if each]
pause = float(os.environ.get("TRIMARAN_TEST_PAUSE", "0"))
enter = SupervisorLink.enter


def enter_and_break(self: SupervisorLink, section: Section, at: int = 0) -> None:
    enter(self, section, at)
    if section in ("first", "step"):
        time.sleep(pause)
        for fault, rank, step, *attempt in plans:
            if (rank, step) == (os.environ["RANK"], str(at)) and attempt in ([], [str(self.attempt)]):
                FAULTS[fault]()


SupervisorLink.enter = enter_and_break  # type: ignore[method-assign]
