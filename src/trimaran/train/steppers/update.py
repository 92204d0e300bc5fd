"""The end of a step: clip by the global norm, move the weights, clear the gradients."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimaran.core import Plan, TrainSection
from trimaran.nets.local_shards import local_part
from trimaran.optim import LR_FACTOR
from trimaran.optim.adamw import LeanAdamW
from trimaran.parallel import RankMesh
from trimaran.parallel.axes.image_split import sum_addends
from trimaran.parallel.axes.pp import Trained
from trimaran.parallel.gradient_norm import gradient_squares
from trimaran.train.checkpointing.training_state import Counter, TrainingState, facts_of, forgotten
from trimaran.train.health.guard import Guard
from trimaran.train.metrics.group_norms import GroupMeter
from trimaran.train.metrics.step_clock import Clock


class Updater:
    """Moves the weights once the gradients are those of the global batch.

    `trained` are the parameters in the norm: all but the copies that another stage counts. A step that the guard
    refuses moves neither weights nor moments, on any rank; the optimizer has to know of `found_inf`. `meter` looks at
    what an update does to groups of modules.
    """

    def __init__(  # noqa: PLR0913 - the parts of an update
        self,
        optimizer: Optimizer,
        ranks: RankMesh,
        clock: Clock,
        *,
        trained: Trained,
        clip_norm: float,
        guard: Guard | None = None,
        meter: GroupMeter | None = None,
    ) -> None:
        self._optimizer, self._ranks, self._clock = optimizer, ranks, clock
        self._trained, self._clip_norm, self.guard = trained, clip_norm, guard or Guard()
        # Where the optimizer looks for the guard's word: beside the weights, which may be offloaded.
        held = (each for group in optimizer.param_groups for each in group["params"])
        self._beside = next((each.device for each in held), ranks.device)  # a rank whose stages are frozen has nothing
        self._meter = meter or GroupMeter({}, every=0, pp=1, device=self._beside)
        self._details: Callable[[], dict[str, Any]] = dict
        self.unused: Callable[[], dict[str, Any]] = dict  # see `watch_unused`

    @property
    def scale(self) -> float:
        """What the loss of this step is multiplied by before backward."""
        return self.guard.loss_scale.value if self.guard.loss_scale else 1.0

    def update(self, lr: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Move the weights at this learning rate after a step with this mean loss, unless the guard refuses it.

        Returns the gradient norm before clipping, without the scale, and 1.0 where the step was refused, else 0.0.
        """
        if self._trained.addends:
            sum_addends(self._trained.addends, self._ranks.group("tp"))
        groups, pp = [*self._trained.towers.values()], self._ranks.degrees.pp
        squares = gradient_squares(groups, pp=pp, device=self._beside).to(self._ranks.device)
        norm = squares.sum().sqrt()
        self._clock.lap("comm")
        scale = self.scale
        if self.guard.loss_scale is not None:
            norm = norm / scale
        of_norms = self._reader(squares, scale)
        refused = self.guard.refuses(loss, norm)
        # What torch's fused kernel asks before it touches anything. A copy to the CPU must have arrived by then.
        self._optimizer.found_inf = refused.to(self._beside)  # pyrefly: ignore[missing-attribute]
        before = self._meter.begin()
        self._move(lr, norm, 1 / scale)
        of_groups = self._meter.end(before, scale)
        self._details = lambda: of_norms() | of_groups()
        self._optimizer.zero_grad()
        return norm, refused

    def forget(self) -> None:
        """Clear the gradients, without a trace of them in the weights."""
        self._optimizer.zero_grad()

    def details(self) -> Callable[[], dict[str, Any]]:
        """Return a reader of what the metrics line of the last step says about it, for a step later."""
        of_step, unused = self._details, self.unused()
        return lambda: of_step() | unused

    def _reader(self, squares: Tensor, scale: float) -> Callable[[], dict[str, Any]]:
        scales = {"loss_scale": scale} if self.guard.loss_scale is not None else {}
        if len(self._trained.towers) == 1:
            return lambda: scales
        copy, names = on_host_later(squares.sqrt() / scale), [*self._trained.towers]

        def read() -> dict[str, Any]:
            norms = zip(names, copy().tolist(), strict=True)
            return scales | {"towers": {name: {"grad_norm": norm} for name, norm in norms}}

        return read

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
        factors = torch.full_like(norm, factor)
        if self._clip_norm:
            factors = factors * (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
        if isinstance(self._optimizer, LeanAdamW):  # multiplies on its way through the gradients
            self._optimizer.factor = factors.to(self._beside)
        elif self._clip_norm or factor != 1:
            multiply_gradients((each for group in groups for each in group["params"]), factors)
        for group in groups:
            group["lr"] = lr * group.get(LR_FACTOR, 1.0)
        self._optimizer.step()


def multiply_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients in place, however each is split: torch's own clipping takes only those of one mesh."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in parameters:
        if each.grad is not None:
            by_device.setdefault(each.grad.device, []).append(local_part(each.grad))
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))  # what torch's clipping calls


def on_host_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Return what gives the tensor on the CPU, once its copy has arrived: nobody waits for it before."""
    copy = tensor.to("cpu", non_blocking=True)
    copied = torch.cuda.Event() if tensor.is_cuda else None
    if copied is not None:
        copied.record()

    def read() -> Tensor:
        if copied is not None:
            copied.synchronize()
        return copy

    return read
