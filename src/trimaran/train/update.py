"""The end of a step: clip by the global norm, move the weights, clear the gradients."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimaran.core import Plan, TrainSection
from trimaran.nets.shards import local_part
from trimaran.parallel import RankMesh, gradient_norm
from trimaran.train.clock import Clock
from trimaran.train.guard import Guard
from trimaran.train.state import Counter, TrainingState, facts_of, forgotten


class Updater:
    """Moves the weights once the gradients are those of the global batch.

    `counted` are the parameters in the norm: all but the copies that another stage counts. A step that the guard
    refuses moves neither weights nor moments, on any rank; the optimizer has to know of `found_inf`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        ranks: RankMesh,
        clock: Clock,
        *,
        counted: Sequence[nn.Parameter],
        clip_norm: float,
        guard: Guard | None = None,
    ) -> None:
        self._optimizer, self._ranks, self._clock = optimizer, ranks, clock
        self._counted, self._clip_norm, self.guard = counted, clip_norm, guard or Guard()
        # Where the optimizer looks for the guard's word: beside the weights, which may be offloaded.
        self._beside = optimizer.param_groups[0]["params"][0].device
        self._details: dict[str, Any] = {}

    @property
    def scale(self) -> float:
        """What the loss of this step is multiplied by before backward."""
        return self.guard.loss_scale.value if self.guard.loss_scale else 1.0

    def update(self, lr: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Move the weights at this learning rate after a step with this mean loss, unless the guard refuses it.

        Returns the gradient norm before clipping, without the scale, and 1.0 where the step was refused, else 0.0.
        """
        norm = gradient_norm(self._counted, pp=self._ranks.degrees.pp).to(self._ranks.device)
        self._clock.lap("comm")
        scale = self.scale
        if self.guard.loss_scale is not None:
            norm = norm / scale
            self._details = {"loss_scale": scale}
        refused = self.guard.refuses(loss, norm)
        # What torch's fused kernel asks before it touches anything. A copy to the CPU must have arrived by then.
        self._optimizer.found_inf = refused.to(self._beside)  # pyrefly: ignore[missing-attribute]
        self._move(lr, norm, 1 / scale)
        self._optimizer.zero_grad()
        return norm, refused

    def details(self) -> dict[str, Any]:
        """Return what the metrics line of the last step says about it."""
        return self._details

    @property
    def counters(self) -> dict[str, Counter]:
        """What counts from step to step and must be kept, by the name it is kept under."""
        found: dict[str, Counter] = {"guard": self.guard}
        if self.guard.loss_scale is not None:
            found["loss_scale"] = self.guard.loss_scale
        return found

    def state(self, modules: Sequence[nn.Module], train: TrainSection, plan: Plan) -> TrainingState:
        """Return what is to be kept of the modules that this moves, and of how it moves them."""
        facts, forgets = facts_of(train), forgotten(plan)
        return TrainingState(modules, self._optimizer, counters=self.counters, facts=facts, forgets=forgets)

    def _move(self, lr: float, norm: Tensor, factor: float) -> None:
        groups = self._optimizer.param_groups
        everything = [each for group in groups for each in group["params"]]
        if self._clip_norm:
            multiply_gradients(everything, factor * (self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        elif factor != 1:
            multiply_gradients(everything, norm.new_tensor(factor))
        for group in groups:
            group["lr"] = lr
        self._optimizer.step()


def multiply_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients in place, however each is split: torch's own clipping takes only those of one mesh."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in parameters:
        if each.grad is not None:
            by_device.setdefault(each.grad.device, []).append(local_part(each.grad))
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))  # what torch's clipping calls
