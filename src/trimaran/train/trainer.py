"""The training loop."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from trimaran.core import Recipe
from trimaran.data import BatchFeed, Loader
from trimaran.parallel import learning_rate
from trimaran.train.agreement import FlagAllReduce, LoopExit, RunRequests, StepCheck, StepDecision
from trimaran.train.evaluate import HoldoutEvaluator
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.metrics.step_recorder import PendingStep, StepRecorder
from trimaran.train.process.supervisor_link import SupervisorLink
from trimaran.train.steppers.stepper import Stepper


class StepSaver(Protocol):
    """Saves the state while a trainer trains: a `Checkpointer`, as a rule. Every rank makes the same calls."""

    @property
    def wants_save(self) -> bool:
        """Whether a checkpoint is due; the ranks agree on it with the next step."""

    def before_update(self) -> None:
        """Make the update wait for a copy in progress."""

    def after_step(self, step: int, decision: StepDecision) -> None:
        """Copy or save the state after `step` steps, if due."""

    def wait_until_copied(self) -> None:
        """Return when no copy reads the state any more."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Trains with parts that are built; see `_run_steps`. `feed` returns data without quarantined samples."""

    recipe: Recipe
    device: torch.device
    loader_from: Callable[[int], AbstractContextManager[Loader]]
    feed: Callable[[], BatchFeed]
    stepper: Stepper
    evaluator: HoldoutEvaluator
    recorder: StepRecorder
    check: StepCheck
    clock: StepClock
    requests: RunRequests
    link: SupervisorLink
    reseed: Callable[[int], None]

    def train(self, saver: StepSaver, start: int, *, pause_after: int | None = None) -> LoopExit:
        """Train from step `start` to the recipe's last, or until all ranks agree to stop, rewind or change.

        `saver` saves the state. `pause_after`: also return once this many steps are done and replicas are in sync.
        """
        if start < self.recipe.train.steps and FlagAllReduce(bool(self.requests.stop)).wait():
            return LoopExit(step=start, reason="stop")  # requested while the parts were built
        with self.loader_from(start) as loader, self.recorder.profiler.active(start):
            return self._run_steps(loader, saver, start, pause_after or self.recipe.train.steps)

    def _run_steps(self, loader: Loader, saver: StepSaver, done: int, pause_after: int) -> LoopExit:
        pending: deque[PendingStep] = deque()
        loop_exit: LoopExit | None = None
        every, steps, start = self.recipe.train.evaluate.every, self.recipe.train.steps, done
        comm = self.check.plan.comm
        self.clock.restart()
        for host_batch in loader:
            self.link.report_section("step" if host_batch.step > start + 1 else "first", host_batch.step)
            self.recorder.note_batch(host_batch, loader)
            batch = host_batch.to(self.device)
            self.clock.lap("data")
            self.reseed(batch.step)
            requests = bool(self.requests.stop), saver.wants_save, self.recorder.profiler.is_requested
            self.stepper.step(
                batch, requests=(*requests, self.requests.change(batch.step), *self.recorder.meters.rank_counts)
            )
            lr = learning_rate(batch.step, self.recipe.train)
            self.clock.enter("checkpoint")
            saver.before_update()
            self.clock.lap("checkpoint", then="optimizer")
            norm, refused = self.stepper.update(lr)
            read_numbers = self.stepper.numbers_later(norm, refused)
            self.clock.lap("optimizer", then="data")
            done = batch.step + 1
            # With local steps, save and stop only after replicas have synchronised: in between their weights differ.
            in_sync = done % comm.sync_every == 0
            # Read the numbers of steps before only now, so that the device never waits for the host.
            decision = self._read(pending, loader, keep=0 if in_sync else comm.local.read_delay - 1)
            if in_sync:
                decision = self.check.check_replicas(done, decision)
            loop_exit = loop_exit or decision.loop_exit
            goes_on = loop_exit is None or loop_exit.reason == "change"
            if in_sync and goes_on:
                # The host's work since the update counts as data, saved or not.
                self.clock.lap("data", then="checkpoint")
                saver.after_step(done, decision)
                self.clock.lap("checkpoint", then="data")
            pending.append(PendingStep(step=done, lr=lr, read_numbers=read_numbers, host_time=self.clock.host_time(),
                                       read_seconds=self.clock.end_step(), read_details=self.stepper.details(),
                                       loader_stats=loader.stats(), tokens=batch.num_valid))  # fmt: skip
            self.recorder.profiler.between_steps(done, requested=decision.profile)
            if goes_on and every and done % every == 0 and done < steps:
                self.clock.enter("evaluation")
                with self.recorder.compilations.outside_steps(done):
                    loop_exit = LoopExit(reason="stop") if self.evaluator.run(step=done) else loop_exit
                self.clock.restart()
            if loop_exit is None and done >= pause_after and done < steps:
                loop_exit = LoopExit(reason="pause")
            if loop_exit is not None and (in_sync or loop_exit.reason == "rewind"):
                break
            self.link.report_section("data", done)
        self.link.report_section("finish", done)
        if loop_exit is None or loop_exit.reason != "rewind":
            last = self._read(pending, loader).loop_exit
            goes_on = loop_exit is not None and loop_exit.reason in ("change", "pause")
            loop_exit = (last or loop_exit) if goes_on else (loop_exit or last)
        return self._finish(loop_exit, done)

    def _read(self, pending: deque[PendingStep], loader: Loader, *, keep: int = 0) -> StepDecision:
        """Record finished steps, all but the last `keep`, and return the decision that follows from them.

        A rewind discards the steps after the one that caused it: they are trained again.
        """
        decision = StepDecision()
        while len(pending) > keep:
            record = self.recorder.record(pending.popleft(), loader)
            decision = decision.then(self.check.decide(record, loader.samples))
            if decision.loop_exit is not None and decision.loop_exit.reason == "rewind":
                pending.clear()
        return decision

    def _finish(self, loop_exit: LoopExit | None, done: int) -> LoopExit:
        """Return why the loop ended after `done` steps. For a rewind, quarantine the samples that caused it."""
        if loop_exit is None or (loop_exit.reason in ("stop", "change") and done == self.recipe.train.steps):
            return LoopExit(step=done, reason="done")
        if loop_exit.reason != "rewind":
            return replace(loop_exit, step=done)
        assert loop_exit.refusal is not None
        self.check.guard.rewind(loop_exit.refusal, write=self.check.journal.rank == 0)
        return loop_exit
