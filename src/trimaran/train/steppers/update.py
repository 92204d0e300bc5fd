"""The end of a step: clip by the global norm, update the weights, clear the gradients."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimaran.core import DEVICE_TRAITS, TrainSection
from trimaran.data import StepBatch
from trimaran.nets import is_dtensor, local_part
from trimaran.parallel import LR_FACTOR, GradientSquares, RankMesh, TrainedParameters, split_weights_of
from trimaran.parallel.optimizer.build_optimizer import SplitWeightsOptimizer
from trimaran.parallel.tensor_sums import sum_partial_gradients
from trimaran.train.checkpointing.training_state import TrainingCounter, TrainingState, saved_settings
from trimaran.train.health.guard import Guard
from trimaran.train.metrics.group_norms import GroupMeter
from trimaran.train.metrics.router_stats import copy_to_host_async
from trimaran.train.steppers.feature import MakeTotals, UpdatePart
from trimaran.train.steppers.step_totals import StepTotals


class Updater:
    """Updates the weights from the gradients of the global batch.

    `trained` are the parameters in the norm: all except copies that another stage counts. If the guard refuses a step,
    neither weights nor moments change, on any rank; the optimizer must support `found_inf`. `meter` measures updates by
    groups of modules. `parts` come from the plan's features. `unused` returns the metrics of parameters without a
    gradient.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        ranks: RankMesh,
        *,
        trained: TrainedParameters,
        clip_norm: float,
        guard: Guard | None = None,
        meter: GroupMeter | None = None,
        parts: Sequence[UpdatePart] = (),
        unused: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._optimizer, self._ranks = optimizer, ranks
        self.split_weights = split_weights_of(optimizer)
        self._trained, self._clip_norm, self.guard = trained, clip_norm, guard or Guard()
        # The optimizer expects `found_inf` on the device of the weights, which may be offloaded. A rank whose stages
        # are frozen has no weights.
        held = (each for group in optimizer.param_groups for each in group["params"])
        self._weights_device = next((each.device for each in held), ranks.device)
        self._updates_on_host = not DEVICE_TRAITS[self._weights_device.type].has_own_memory
        towers = [*trained.towers.values()]
        self._gradients = GradientSquares(towers, pp=ranks.degrees.pp, device=self._weights_device)
        self._meter = meter or GroupMeter({}, every=0, pp=1, device=self._weights_device)
        self._details: Callable[[], dict[str, Any]] = dict
        self._step = 0  # of the run, the current one included
        self.parts, self._unused = parts, unused
        self._make_totals: MakeTotals = StepTotals
        for part in parts:
            self._make_totals = part.wrap_totals(self._make_totals)

    def begin_step(self, batch: StepBatch, requests: Sequence[int]) -> StepTotals:
        """Start a step: return its sums over all ranks, the first of which is on its way."""
        self._step = batch.step + 1
        totals = self._make_totals(batch, self._ranks, self.guard, requests=requests)
        for part in self.parts:
            part.begin_step(batch, self.scale)
        return totals

    @property
    def scale(self) -> float:
        """The factor by which the loss of this step is multiplied before backward."""
        return self.guard.loss_scale.value if self.guard.loss_scale else 1.0

    def measure_gradients(self) -> Tensor:
        """Return what this rank contributes to the squared gradient norm of each tower, once backward is complete."""
        if self._trained.with_partial_gradient:
            sum_partial_gradients(self._trained.with_partial_gradient, self._ranks.group("tp"))
        self._gradients.measure()
        return self._gradients.group_squares().to(self._ranks.device)

    def update(self, lr: float, loss: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Update the weights at this learning rate, unless the guard refuses a step with this mean loss.

        `squares` is the sum of `measure_gradients` over all ranks. Returns the gradient norm before clipping, without
        the loss scale, and 1.0 if the step was refused, else 0.0.
        """
        norm, scale = squares.sum().sqrt().float(), self.scale
        if self.guard.loss_scale is not None:
            norm = norm / scale
        norm_details = self._norm_details(squares, scale)
        refused = self.guard.refuses(loss, norm)
        # torch's fused kernel reads `found_inf` before it changes anything. A copy to the CPU must be complete by then.
        # Without it torch does not correct the number of steps of each parameter, a small operator each.
        is_applied = refused.is_cpu and self._updates_on_host and not bool(refused)
        found_inf = None if is_applied else refused.to(self._weights_device)
        self._optimizer.found_inf = found_inf  # pyrefly: ignore[missing-attribute]
        before = self._meter.begin(self._gradients)
        groups = self._optimizer.param_groups
        factors = None if 1 / scale == 1 else torch.full_like(norm, 1 / scale)
        if self._clip_norm:
            clip = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
            factors = clip if factors is None else factors * clip
        if isinstance(self._optimizer, SplitWeightsOptimizer):  # it multiplies the gradients itself
            self._optimizer.factor = None if factors is None else factors.to(self._weights_device)
        elif factors is not None:
            multiply_gradients((each for group in groups for each in group["params"]), factors)
        for group in groups:
            group["lr"] = lr * group.get(LR_FACTOR, 1.0)
        self._optimizer.step()
        group_details = self._meter.end(before, scale)
        part_details = [part.after_update(self._step, refused) for part in self.parts]
        readers = (norm_details, group_details, *part_details)
        self._details = lambda: {name: value for read in readers for name, value in read().items()}
        self._optimizer.zero_grad()
        self.record_shards()
        return norm, refused

    def record_shards(self) -> None:
        """Record what the memory of this rank holds now: whoever has just written to it calls this."""
        if self.guard.shard_check is not None:
            self.guard.shard_check.record(self._gradients.parameters)

    def clear_gradients(self) -> None:
        self._optimizer.zero_grad()

    def details(self) -> Callable[[], dict[str, Any]]:
        step_details, unused = self._details, self._unused()
        return lambda: step_details() | unused

    def _norm_details(self, squares: Tensor, scale: float) -> Callable[[], dict[str, Any]]:
        scales = {"loss_scale": scale} if self.guard.loss_scale is not None else {}
        if len(self._trained.towers) == 1:
            return lambda: scales
        copy, names = copy_to_host_async(squares.sqrt() / scale), [*self._trained.towers]

        def read() -> dict[str, Any]:
            norms = zip(names, copy().tolist(), strict=True)
            return scales | {"towers": {name: {"grad_norm": norm} for name, norm in norms}}

        return read

    @property
    def counters(self) -> dict[str, TrainingCounter]:
        counters: dict[str, TrainingCounter] = {"guard": self.guard}
        if self.guard.loss_scale is not None:
            counters["loss_scale"] = self.guard.loss_scale
        for part in self.parts:
            counters |= part.counters
        return counters

    def state(self, modules: Sequence[nn.Module], train: TrainSection, *, without_base: bool) -> TrainingState:
        return TrainingState(
            modules,
            self._optimizer,
            counters=self.counters,
            settings=saved_settings(train),
            without_base=without_base,
            keys=next((part.keys for part in self.parts if part.keys is not None), None),
            parts=[state for part in self.parts for state in part.state],
        )


def multiply_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients in place. They may be sharded over different meshes, which torch's clipping refuses."""
    if factor.is_cpu and float(factor) == 1:
        return
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in parameters:
        if each.grad is not None:
            gradient = local_part(each.grad) if is_dtensor(each.grad) else each.grad
            by_device.setdefault(gradient.device, []).append(gradient)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))  # what torch's clipping calls
