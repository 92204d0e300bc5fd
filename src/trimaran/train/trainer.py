"""The training loop."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from trimaran.core import Plan, Recipe
from trimaran.data.loader import Loader
from trimaran.optim.schedule import learning_rate
from trimaran.train.agreement import Agreed, Ending, Poll
from trimaran.train.checkpointing.checkpointer import Checkpointer
from trimaran.train.evaluate import Evaluator
from trimaran.train.metrics.step_clock import Clock
from trimaran.train.metrics.step_monitor import Pending, StepMonitor
from trimaran.train.process.stop_request import StopRequest
from trimaran.train.process.supervisor_link import SupervisorLink
from trimaran.train.steppers.stepper import Stepper


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The parts of a run, already built and wired; `train` is the loop."""

    recipe: Recipe
    plan: Plan
    device: torch.device
    loader_from: Callable[[int], Loader]
    stepper: Stepper
    evaluator: Evaluator
    checkpointer: Checkpointer
    monitor: StepMonitor
    clock: Clock
    stop: StopRequest
    link: SupervisorLink
    reseed: Callable[[int], None]

    def train(self, start: int = 0) -> Ending:
        """Run from step `start` to the recipe's end, or to the step at which all ranks agreed to stop or go back."""
        if start < self.recipe.train.steps and Poll(bool(self.stop)).wait():
            return Ending(step=start, reason="stop")  # asked while everything was built
        with self.loader_from(start) as loader, self.monitor.profiler.watch(start):
            return self._train(loader, start)

    def _wishes(self) -> tuple[bool, ...]:
        """Return what this rank wishes of all, in the order of WISHES."""
        return bool(self.stop), self.checkpointer.wants_save, self.monitor.profiler.is_asked

    def _train(self, loader: Loader, done: int) -> Ending:
        pending: Pending | None = None
        ending: Ending | None = None
        every, steps, start = self.recipe.train.evaluate.every, self.recipe.train.steps, done
        self.clock.restart()
        for host_batch in loader:
            self.link.enter("step" if host_batch.step > start + 1 else "first", host_batch.step)
            self.monitor.note(host_batch, loader)
            batch = host_batch.to(self.device)
            self.clock.lap("data")
            self.reseed(batch.step)
            numbers = self.stepper.step(batch, wishes=self._wishes())
            lr = learning_rate(batch.step, self.recipe.train)
            self.checkpointer.before_update()
            self.clock.lap("checkpoint")
            norm, refused = self.stepper.update(lr)
            numbers = torch.cat([numbers, norm.reshape(1), refused.reshape(1)]).to("cpu", non_blocking=True)
            self.clock.lap("optimizer")
            done = batch.step + 1
            # The step before is read only now, so that the device never waits for the host.
            agreed = self.monitor.read(pending, loader) if pending is not None else Agreed()
            # Replicas that train alone are kept, and stop, where they meet: only then are the weights those of all.
            meets = done % self.plan.comm.local_steps == 0
            if meets:
                agreed = self.monitor.compare(done, agreed)
            ending = ending or agreed.ending
            if meets and ending is None:
                self.clock.lap("data")  # where the host's bookkeeping ends up, kept or not
                self.checkpointer.after_step(done, agreed)
                self.clock.lap("checkpoint")
            pending = Pending(
                step=done,
                lr=lr,
                numbers=numbers,
                reading=self.clock.read(),
                details=self.stepper.details(),
                loads=loader.facts(),
                tokens=batch.num_valid,
            )
            self.monitor.profiler.turn(done, asked=agreed.profile)
            if ending is None and every and done % every == 0 and done < steps:
                with self.monitor.compilations.aside(done):
                    ending = Ending(reason="stop") if self.evaluator.run(step=done) else None
                self.clock.restart()
            if ending is not None and (meets or ending.reason == "rewind"):
                break
            self.link.enter("data", done)
        if pending is not None and (ending is None or ending.reason != "rewind"):
            last = self.monitor.read(pending, loader).ending
            ending = ending or last
        return self._end(ending, done)

    def _end(self, ending: Ending | None, done: int) -> Ending:
        """Return how it ends after `done` steps. Samples that a rewind is for are left out from now on."""
        if ending is None or (ending.reason == "stop" and done == self.recipe.train.steps):
            return Ending(step=done, reason="done")
        if ending.reason != "rewind":
            return replace(ending, step=done)
        assert ending.refusal is not None
        self.monitor.guard.rewind(ending.refusal, write=self.monitor.journal.rank == 0)
        return ending
