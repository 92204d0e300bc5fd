"""Faults of rank 1 while the plan of its run changes, in the first attempt. See `plugin` for how ranks import it.

TRIMARAN_TEST_CHANGE is the fault: `kill-build`, `kill-step` or `oom-step`.
"""

import os
import signal
from typing import Any

import torch

from tests.fault import plugin  # noqa: F401 - the pause of every step
from trimaran.train.change import apply_change, rebuild

FAULT = os.environ["TRIMARAN_TEST_CHANGE"]
IS_HERE = os.environ["RANK"] == "1" and os.environ.get("TRIMARAN_ATTEMPT", "0") == "0"
build_empty_networks, try_step = rebuild.build_empty_networks, apply_change.PlanChanger._try_step


def broken_build(*args: Any) -> Any:
    networks = build_empty_networks(*args)
    os.kill(os.getpid(), signal.SIGKILL)
    return networks


def broken_step(self: apply_change.PlanChanger, parts: Any, step: int) -> Any:
    parts.trainer.stepper._loss_function = end_rank if FAULT == "kill-step" else run_out_of_memory
    return try_step(self, parts, step)


def end_rank(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory(*args: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB (planted)")


if IS_HERE and FAULT == "kill-build":
    rebuild.build_empty_networks = broken_build  # pyrefly: ignore[bad-assignment]
elif IS_HERE:
    apply_change.PlanChanger._try_step = broken_step  # type: ignore[method-assign]
apply_change.FAILED_SECONDS = 1.0
