"""The end of a step: clip by the global norm, move the weights, clear the gradients."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimaran.nets.shards import local_part
from trimaran.parallel import RankMesh, gradient_norm
from trimaran.train.clock import Clock
from trimaran.train.loss_scale import LossScale


class Updater:
    """Moves the weights once the gradients are those of the global batch.

    `counted` are the parameters in the norm: all but the copies that another stage counts. With a loss scale, a step
    whose gradients overflowed is skipped, on every rank.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        ranks: RankMesh,
        clock: Clock,
        *,
        counted: Sequence[nn.Parameter],
        clip_norm: float,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._optimizer, self._ranks, self._clock = optimizer, ranks, clock
        self._counted, self._clip_norm, self._loss_scale = counted, clip_norm, loss_scale
        self._details: dict[str, Any] = {}

    @property
    def scale(self) -> float:
        """What the loss of this step is multiplied by before backward."""
        return self._loss_scale.value if self._loss_scale else 1.0

    def update(self, lr: float) -> Tensor:
        """Move the weights at this learning rate and return the gradient norm before clipping, without the scale."""
        norm = gradient_norm(self._counted, pp=self._ranks.degrees.pp).to(self._ranks.device)
        self._clock.lap("comm")
        loss_scale, scale = self._loss_scale, self.scale
        if loss_scale is not None:
            norm = norm / scale
            self._details = {"loss_scale": scale}
        if loss_scale is None or loss_scale.accepts(norm):
            self._move(lr, norm, 1 / scale)
        self._optimizer.zero_grad()
        return norm

    def details(self) -> dict[str, Any]:
        """Return what the metrics line of the last step says about it."""
        return self._details

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
