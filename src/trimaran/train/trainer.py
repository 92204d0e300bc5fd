"""The training loop."""

import logging
import resource
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from trimaran.core import PHASES, Plan, Recipe, StepMetrics
from trimaran.data.loader import Loader
from trimaran.telemetry import Journal
from trimaran.train.clock import Clock, Reading
from trimaran.train.evaluate import Evaluator
from trimaran.train.loss import gradient_norm
from trimaran.train.schedule import learning_rate
from trimaran.train.stepper import PlainStepper
from trimaran.train.stop import StopWish

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A step whose numbers are still on their way from the device."""

    step: int
    lr: float
    numbers: Tensor
    reading: Reading


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The parts of a run, already built and wired; `train` is the loop."""

    recipe: Recipe
    plan: Plan
    device: torch.device
    loader: Loader
    stepper: PlainStepper
    optimizer: Optimizer
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
            lr, norm = self.update(batch.step)
            numbers = torch.cat([numbers, norm.reshape(1)]).to("cpu", non_blocking=True)
            self.clock.lap("optimizer")
            previous, pending = pending, Pending(step=batch.step + 1, lr=lr, numbers=numbers, reading=self.clock.read())
            done = batch.step + 1
            # The step before is read only now, so that the device never waits for the host.
            if previous is not None and self.report(previous):
                break
            if every and done % every == 0 and done < self.recipe.train.steps:
                self.evaluator.run(step=done)
                self.clock.restart()
        if pending is not None:
            self.report(pending)
        return done

    def update(self, step: int) -> tuple[float, Tensor]:
        """Clip by the global norm, move the weights, clear the gradients; return (learning rate, norm before)."""
        train = self.recipe.train
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        norm = gradient_norm(parameters)
        self.clock.lap("comm")
        if train.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, train.clip_norm, norm)
        lr = learning_rate(step, train)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return lr, norm

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
            tokens_per_second=tokens / seconds,
            mfu=prediction.flops_per_step / (seconds * peak) if prediction and peak else 0.0,
            peak_bytes=peak_bytes(self.device),
            phases=phases,
            time=time.time(),
        )
        self.journal.step(metrics)
        log.info("step %d  loss %.4f  %.0f tokens/s", metrics.step, loss, metrics.tokens_per_second)
        return stop > 0


def peak_bytes(device: torch.device) -> int:
    """Return the most memory this rank has held: of the device's allocator, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
