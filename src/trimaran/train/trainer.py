"""The training loop."""

import logging
import resource
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.core import PHASES, Plan, Recipe, StepMetrics
from trimaran.data.loader import Loader
from trimaran.telemetry import Journal
from trimaran.train.clock import Clock, Reading
from trimaran.train.evaluate import Evaluator
from trimaran.train.schedule import learning_rate
from trimaran.train.stepper import Details, Stepper
from trimaran.train.stop import StopWish

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A step whose numbers are still on their way from the device."""

    step: int
    lr: float
    numbers: Tensor
    reading: Reading
    details: Details


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The parts of a run, already built and wired; `train` is the loop."""

    recipe: Recipe
    plan: Plan
    device: torch.device
    loader: Loader
    stepper: Stepper
    evaluator: Evaluator
    journal: Journal
    clock: Clock
    stop: StopWish

    def train(self) -> int:
        """Run to the recipe's end, or to the step at which all ranks agreed to stop; return the steps done."""
        pending: Pending | None = None
        every, done = self.recipe.train.evaluate.every, 0
        self.clock.restart()
        for host_batch in self.loader:
            batch = host_batch.to(self.device)
            self.clock.lap("data")
            numbers = self.stepper.step(batch, stop=bool(self.stop))
            lr = learning_rate(batch.step, self.recipe.train)
            norm = self.stepper.update(lr)
            numbers = torch.cat([numbers, norm.reshape(1)]).to("cpu", non_blocking=True)
            self.clock.lap("optimizer")
            done = batch.step + 1
            now = Pending(step=done, lr=lr, numbers=numbers, reading=self.clock.read(), details=self.stepper.details())
            previous, pending = pending, now
            # The step before is read only now, so that the device never waits for the host. Replicas that train alone
            # stop where they meet: only then are the weights those of all of them.
            if previous is not None and self.report(previous) and done % self.plan.comm.local_steps == 0:
                break
            if every and done % every == 0 and done < self.recipe.train.steps:
                self.evaluator.run(step=done)
                self.clock.restart()
        if pending is not None:
            self.report(pending)
        return done

    def report(self, pending: Pending) -> bool:
        """Write the step's metrics; return whether any rank wished to stop then."""
        phases = dict.fromkeys(PHASES, 0.0) | pending.reading()  # waits for that step's marks, so the numbers are there
        loss, tokens, stop, norm = pending.numbers.tolist()
        seconds = sum(phases.values())
        prediction, world = self.plan.prediction, self.plan.mesh.world_size
        peak = prediction.device_peak_flops * world if prediction else 0.0
        metrics = StepMetrics(
            step=pending.step,
            loss=loss,
            grad_norm=norm,
            lr=pending.lr,
            tokens=round(tokens),
            samples=self.plan.global_batch,
            step_seconds=seconds,
            mfu=prediction.flops_per_step / (seconds * peak) if prediction and peak else 0.0,
            peak_bytes=peak_bytes(self.device),
            phases=phases,
            time=time.time(),
            details=pending.details(),
        )
        self.journal.step(metrics)
        log.info("step %d  loss %.4f  %.0f tokens/s", metrics.step, loss, metrics.tokens_per_second)
        return stop > 0


def peak_bytes(device: torch.device) -> int:
    """Return the most memory this rank has held: of the device's allocator, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
