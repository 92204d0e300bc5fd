"""DeepSpeed behind the same loop: its engine does forward, backward, reduction and update."""

import logging
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from trimaran.checkpoint.tensor_shards import State
from trimaran.core import Plan, TrainSection, UserError
from trimaran.core.deepspeed_config import deepspeed_config
from trimaran.core.optional_packages import deepspeed_missing
from trimaran.data.step_batch import Inputs, StepBatch
from trimaran.nets import Network
from trimaran.optim import LR_FACTOR, decay_groups
from trimaran.parallel import RankMesh, gradient_norm
from trimaran.train.health.guard import Guard
from trimaran.train.loss.objective import LanguageObjective, Objective, likeliest
from trimaran.train.metrics.router_stats import router_statistics
from trimaran.train.metrics.step_clock import Clock
from trimaran.train.steppers.deepspeed_state import deepspeed_state
from trimaran.train.steppers.loss_parts import PartSums
from trimaran.train.steppers.stepper import NO_WISHES, Details, StepCount, judged, losses_of, next_scores, share_of

log = logging.getLogger(__name__)


class ThroughEngine:
    """A module that is called through DeepSpeed's engine, and is itself in everything else."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.module, name)


class DeepSpeedStepper:
    """Hands each micro-batch to the engine; the weights are the engine's, the names stay the network's.

    DeepSpeed counts micro-batches itself: its `step` belongs to each of them and moves the weights only after the last.
    It leaves out steps whose gradient overflows in fp16; the guard's word goes to the optimizer inside of it.
    """

    def __init__(self, network: Network, plan: Plan, ranks: RankMesh, engine: Any, clock: Clock, guard: Guard) -> None:
        through: Any = ThroughEngine(engine)
        self._network, self._called = network, replace(network, module=through)
        self._plan, self._ranks, self._clock = plan, ranks, clock
        self._engine, self._device, self._guard = engine, engine.device, guard
        self.objective: Objective = LanguageObjective()
        self._loss = torch.zeros((), device=self._device)
        engine.basic_optimizer.register_step_pre_hook(self._ask_guard)
        self._of_update: dict[str, Any] = {}
        self._of_routers: Details = dict
        self._of_parts: Details = dict
        self._norm: Tensor | None = None

    def step(self, batch: StepBatch, *, wishes: Sequence[bool] = NO_WISHES) -> Tensor:
        """See `Stepper.step`. DeepSpeed averages over all ranks, and is told to leave the accumulation alone."""
        count = StepCount(batch, self._ranks, self._guard, wishes=wishes)  # hidden behind the first forward
        total, parts = torch.zeros((), device=self._device), PartSums(self.objective, self._ranks)
        for index in range(self._plan.grad_accum):
            if index > 0:
                self._engine.step()
            losses, balance = losses_of(self.objective, self._called, batch.micro(index))
            loss = losses.total
            self._clock.lap("forward")
            num_valid = count.num_valid()
            self._clock.lap("comm")
            self._engine.backward((loss + balance) * (self._plan.mesh.data / num_valid), scale_wrt_gas=False)
            total += loss.detach()
            parts.add(losses)
            self._clock.lap("backward")
        numbers = count.numbers(total)
        self._loss = numbers[0]
        self._of_routers = router_statistics([self._network], self._ranks)
        self._of_parts = parts.read(batch)
        self._clock.lap("comm")
        return numbers

    def update(self, lr: float) -> tuple[Tensor, Tensor]:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr * group[LR_FACTOR]
        if self._plan.precision == "fp16":
            self._of_update = {"loss_scale": float(self._engine.optimizer.loss_scale)}
        if self._plan.sharding == "none":  # plain AdamW, whose gradients are whole and already averaged
            self._norm = gradient_norm([*self._engine.module.parameters()])
            self._engine.step()
        else:
            self._norm = None
            self._engine.step()
            self._norm = torch.as_tensor(self._engine.get_global_grad_norm(), device=self._device)
        return self._norm, self._guard.refuses(self._loss, self._norm)

    def details(self) -> Details:
        of_update, of_routers, of_parts = self._of_update, self._of_routers, self._of_parts
        return lambda: of_update | of_routers() | of_parts()

    def evaluate(self, batch: StepBatch) -> Tensor:
        rows = [judged(self.objective, self._called, batch.micro(index)) for index in range(self._plan.grad_accum)]
        return share_of(torch.stack(rows).sum(0), self._ranks)

    def scores(self, ids: Tensor) -> Tensor:
        return next_scores(self._called, self._ranks, ids)

    @torch.no_grad()
    def guesses(self, inputs: Inputs) -> Tensor:
        return likeliest(self._network, self._called.forward(inputs)[0]).cpu()

    def set_training(self, training: bool) -> None:
        self._engine.train(training)

    def state(self, train: TrainSection) -> State:
        return deepspeed_state(self._network.module, self._engine, train, {"guard": self._guard})

    def _ask_guard(self, optimizer: Any, *_: Any) -> None:
        """Tell torch's AdamW, before it moves a part of the weights, whether it may."""
        norm = self._norm
        if norm is None:  # DeepSpeed has just worked it out
            norm = torch.as_tensor(self._engine.optimizer._global_grad_norm, device=self._device)
        # ZeRO-3 moves one group at a time and leaves the others empty.
        beside = next(each for group in optimizer.param_groups for each in group["params"]).device
        optimizer.found_inf = self._guard.refuses(self._loss, norm).to(beside)


def build_deepspeed(
    network: Network, train: TrainSection, plan: Plan, ranks: RankMesh, clock: Clock, guard: Guard
) -> DeepSpeedStepper:
    """Return the stepper that trains `network`, whole and on the CPU, through DeepSpeed, which moves and splits it.

    DeepSpeed rounds weights to the plan's precision first and takes its fp32 ones from those. Ours go in afterwards, so
    that every plan starts from the same weights.
    """
    device = ranks.axes.device_type
    deepspeed = load_deepspeed(device)
    config = deepspeed_config(plan, train, pin_memory=device == "cuda")
    trained = {name: each for name, each in network.module.named_parameters() if each.requires_grad}
    first = {name: each.data for name, each in trained.items()} if plan.precision != "fp32" else {}
    with redirect_stdout(StringIO()) as said:
        engine, *_ = deepspeed.initialize(
            model=network.module,
            model_parameters=decay_groups({each: name for name, each in trained.items()}, train, network.towers),
            config=config,
            dist_init_required=False,  # the process group is ours
        )
    log.debug(said.getvalue())
    for name, each in network.module.named_parameters():
        if name in first:
            _set_master(deepspeed, each, first.pop(name))
        each.gather_whole = partial(_gather_whole, deepspeed, each)  # pyrefly: ignore[missing-attribute]
    return DeepSpeedStepper(network, plan, ranks, engine, clock, guard)


def load_deepspeed(device: str) -> ModuleType:
    """Return the package. It takes seconds to import and chooses its device then, so only who needs it comes here."""
    try:
        import deepspeed  # noqa: PLC0415
        from deepspeed.accelerator import get_accelerator  # noqa: PLC0415
    except ImportError as error:
        raise deepspeed_missing(str(error)) from error
    except ValueError as error:
        raise _wrong_device(str(error), device) from error
    found = get_accelerator().device_name()
    if found != device:
        raise _wrong_device(f"DeepSpeed has chosen to compute on {found}, and this run computes on {device}", device)
    # It would compile an all-reduce through shared memory at the first start on a CPU; gloo does without.
    deepspeed.ops.__compatible_ops__ = {}  # pyrefly: ignore[missing-attribute]
    # It calls collectives by names that torch 2.13 has replaced, and torch says so at every call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed


def _wrong_device(what: str, device: str) -> UserError:
    return UserError("P038", what, where="DS_ACCELERATOR", fix=f"set DS_ACCELERATOR={device}, or leave it out")


def _set_master(deepspeed: Any, parameter: nn.Parameter, value: Tensor) -> None:
    """Put this rank's part of `value` in the place of the fp32 weights that the optimizer moves."""
    kept: Any = getattr(parameter, "ds_tensor", None)
    if kept is None:
        return deepspeed.utils.safe_set_full_fp32_param(parameter, value)
    # ZeRO-3 fills the last part up; its own way to set a whole value stumbles over that.
    size = kept.numel()
    padded = F.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
    return deepspeed.utils.safe_set_local_fp32_param(parameter, padded[size * dist.get_rank() :][:size])


def _gather_whole(deepspeed: Any, parameter: nn.Parameter) -> Tensor:
    """Return the fp32 weights from their parts on all ranks; what is not trained has none and is gathered as it is."""
    value = deepspeed.utils.safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
    if value is not None:
        return value.view(getattr(parameter, "ds_shape", parameter.shape))
    with deepspeed.zero.GatheredParameters(parameter):
        return parameter.detach().clone()
