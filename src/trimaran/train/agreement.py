"""Decisions of all ranks at the same step: requests are all-reduced with a step's counts, and read later.

See principle 5, docs/principles.md. The result is read one step later, or a few if replicas train alone.
"""

import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist

from trimaran.core import Plan
from trimaran.parallel import broadcast_json
from trimaran.runs import Journal
from trimaran.train.health.guard import Guard, RefusedStep, Samples, StepNumbers
from trimaran.train.health.memory_check import MAX_REPORTED_KEYS, CompareReplicas

log = logging.getLogger(__name__)

RankRequest = Literal["stop", "save", "profile", "change"]
RANK_REQUESTS: tuple[RankRequest, ...] = ("stop", "save", "profile", "change")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """What to do after a step, the same on every rank.

    `refusal` says why the step's update was not applied; None if it was, and after an overflow that the loss scale
    expects. `bad_data`: too many samples could not be used.
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
    """An asynchronous all-reduce of one flag, on the CPU, so that no rank waits for its device."""

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
    """What people ask of a running run: to stop and, by `change` after a step, to change its plan."""

    stop: StopRequest
    change: Callable[[int], bool] = lambda step: False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The numbers of a step on the host, the same on every rank.

    `requests`: what any rank requested. `loss_scaled`: the step used a loss scale. `rows`: the loader's counts, summed
    over all ranks.
    """

    numbers: StepNumbers
    requests: StepDecision
    loss_scaled: bool
    rows: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """Decides after every step, the same on every rank. Every rank calls every method, in the same order.

    `compare_replicas` finds differences between the weights of replicas, and `search` the origin of a NaN or Inf: it
    returns fields of the `skip` event.
    """

    plan: Plan
    guard: Guard
    journal: Journal
    compare_replicas: CompareReplicas
    search: Callable[[RefusedStep], dict[str, Any]] = lambda refusal: {}

    def decide(self, record: StepRecord, samples: Samples) -> StepDecision:
        """Return the decision after a step; write a `skip` event if it was refused."""
        refusal = self.guard.read(record.numbers, self.plan.mesh, samples, scaled=record.loss_scaled)
        if refusal is not None:
            log.warning("step %d was refused: %s", refusal.step, refusal.reason)
        if refusal is not None and refusal.memory_changed:
            shard_check, rank = self.guard.shard_check, refusal.ranks[0]
            mine = shard_check.changed_keys() if shard_check is not None and self.journal.rank == rank else []
            keys = broadcast_json(mine[:MAX_REPORTED_KEYS], src=rank)
            if self.journal.rank == 0:
                message = f"{refusal.reason}: {', '.join(keys[:2])}"
                facts = {"type": "MemoryChanged", "message": message, "cause": "numeric", "ranks": list(refusal.ranks)}
                self.journal.event("differ", step=refusal.step, **facts, keys=keys, since=refusal.good_step,
                                   action=refusal.action)  # fmt: skip
        elif refusal is not None:
            origin = self.search(refusal) if refusal.not_finite and not record.numbers.batches_differ else {}
            if self.journal.rank == 0:
                self.journal.event("skip", **refusal.as_dict(), **origin)
        return replace(record.requests, bad_data=self.guard.bad_samples.too_many(record.rows), refusal=refusal)

    def check_replicas(self, step: int, decision: StepDecision) -> StepDecision:
        """Return `decision`, with a refusal if replicas differ after `step`; then also write a `differ` event."""
        difference = self.compare_replicas(step)
        if difference is None:
            return decision
        refusal = self.guard.on_replica_difference(difference)
        log.warning("step %d: %s", step, refusal.reason)
        if self.journal.rank == 0:
            self.journal.event("differ", step=step, **difference.as_dict(), action=refusal.action)
        return replace(decision, refusal=refusal)
