"""Decisions that all ranks take together, at the same step (principle 5, docs/principles.md).

Each rank's requests are all-reduced with the counts of a step, and every rank reads the result one step later, or a few
steps later if replicas train alone.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import torch
import torch.distributed as dist

from trimaran.train.health.guard import RefusedStep

RankRequest = Literal["stop", "save", "profile", "change"]
RANK_REQUESTS: tuple[RankRequest, ...] = ("stop", "save", "profile", "change")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """What to do after a step, the same on every rank.

    `refusal` says why the update of the step was not applied; None if it was applied, and after an overflow that the
    loss scale expects (see `Guard.read`). `bad_data`: too many samples could not be used.
    """

    stop: bool = False
    save: bool = False
    profile: bool = False
    change: bool = False
    bad_data: bool = False
    refusal: RefusedStep | None = None

    def then(self, later: "StepDecision") -> "StepDecision":
        """Return what to do if both are read at once: all requests, and one refusal, the first that ends the loop."""
        refusals = [each for each in (self.refusal, later.refusal) if each is not None]
        return StepDecision(
            stop=self.stop or later.stop,
            save=self.save or later.save,
            profile=self.profile or later.profile,
            change=self.change or later.change,
            bad_data=self.bad_data or later.bad_data,
            refusal=next((each for each in refusals if each.action != "skip"), refusals[0] if refusals else None),
        )

    @property
    def loop_exit(self) -> "LoopExit | None":
        """How the training loop exits because of this decision; None if it continues."""
        match self.refusal:
            case RefusedStep(action="rewind"):
                return LoopExit(step=self.refusal.good_step, reason="rewind", refusal=self.refusal)
            case RefusedStep(action="stop"):
                return LoopExit(step=self.refusal.step, reason="numeric", refusal=self.refusal)
        if self.bad_data:
            return LoopExit(reason="data")
        if self.stop:
            return LoopExit(reason="stop")
        return LoopExit(reason="change") if self.change else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopExit:
    """Why the training loop returned, and after how many steps (`step`).

    `rewind`: restore the state of `step` or of an earlier step and train again; `refusal` says why. `numeric`: a loss
    or a gradient was bad and the run cannot continue. `data`: too many samples were bad. `change`: another plan was
    requested, see `train/features/live_change`. `leave`: this elastic replica ends, and the others go on. `pause`: the
    steps that `Trainer.train` was asked for are done, but not all steps.
    """

    reason: Literal["done", "stop", "rewind", "numeric", "data", "change", "leave", "pause"]
    step: int = 0
    refusal: RefusedStep | None = None

    @property
    def weights_are_valid(self) -> bool:
        """Whether the weights may be saved. A refused step leaves them valid; replicas that differ do not."""
        return self.refusal is None or not self.refusal.weights_differ


class FlagAllReduce:
    """An asynchronous all-reduce of one flag: is it set on any rank?

    It runs on the CPU, so that no rank waits for its device.
    """

    def __init__(self, flag: bool) -> None:
        self._count = torch.tensor([int(flag)])
        self._work = dist.all_reduce(self._count, async_op=True)

    def wait(self) -> bool:
        """Return whether any rank has set its flag, the same on every rank."""
        if self._work is not None:
            self._work.wait()
        return bool(self._count)


class StopRequest:
    """True once this process received SIGTERM or SIGINT, or once `file` exists. Only rank 0 is given a file."""

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._signalled = "" if file is None else os.fspath(file), False

    def __bool__(self) -> bool:
        return self._signalled or (self._file != "" and os.path.exists(self._file))  # every step asks

    def listen(self) -> None:
        """Handle SIGTERM and SIGINT as requests to stop after a step. Call it from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequests:
    """What people and programs ask of a running run: to stop, and to change its plan.

    `change` says after a step whether this rank asks for another plan, see `train/features/live_change`.
    """

    stop: StopRequest
    change: Callable[[int], bool] = lambda step: False
