"""The DeepSpeed stepper: DeepSpeed's engine runs forward, backward, reduction and update."""

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from trimaran.core import Plan, TrainSection, UserError
from trimaran.core.engine_rules import deepspeed_config, deepspeed_missing
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.data.step_batch import Inputs, StepBatch
from trimaran.nets import Network
from trimaran.nets.whole_tensors import full_tensor
from trimaran.parallel import LR_FACTOR, RankMesh, decay_groups, gradient_norm
from trimaran.parallel.tensor_shards import CheckpointState
from trimaran.train.features.deepspeed.deepspeed_state import deepspeed_state
from trimaran.train.health.guard import Guard
from trimaran.train.loss.objective import Objective, predicted_tokens
from trimaran.train.metrics.router_stats import balance_routers
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.steppers.engine import StepperContext
from trimaran.train.steppers.step_totals import LossPartSums, ReducedStep, StepTotals
from trimaran.train.steppers.stepper import (
    NO_REQUESTS,
    DetailsReader,
    compute_losses,
    compute_next_token_logits,
    evaluate_micro_batch,
    mask_duplicates,
)

log = logging.getLogger(__name__)


class EngineModule:
    """A module whose calls go through DeepSpeed's engine. All other attributes are the module's own."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.module, name)


class DeepSpeedStepper:
    """Runs each micro-batch through the engine. The engine owns the weights; parameter names stay the network's.

    DeepSpeed counts micro-batches itself: its `step` is called after each, and updates the weights after the last. It
    skips steps whose gradient overflows in fp16. The guard's decision goes to the inner optimizer as `found_inf`.
    """

    def __init__(
        self,
        network: Network,
        plan: Plan,
        ranks: RankMesh,
        engine: Any,
        clock: StepClock,
        guard: Guard,
        objective: Objective,
    ) -> None:
        engine_module: Any = EngineModule(engine)
        self._network, self._engine_network = network, replace(network, module=engine_module)
        self._plan, self._ranks, self._clock = plan, ranks, clock
        self._engine, self._device, self._guard = engine, engine.device, guard
        self.objective = objective
        engine.basic_optimizer.register_step_pre_hook(self._set_found_inf)
        self._update_details: dict[str, Any] = {}
        self._reduced: ReducedStep | None = None
        self._norm: Tensor | None = None

    def step(self, batch: StepBatch, *, requests: Sequence[int] = NO_REQUESTS) -> Tensor:
        """See `Stepper.step`. DeepSpeed averages over all ranks, but does not divide by the accumulation steps."""
        self._clock.enter("forward")
        totals = StepTotals(batch, self._ranks, self._guard, requests=requests)  # overlaps the first forward
        total, parts = torch.zeros((), device=self._device), LossPartSums(self.objective, self._ranks)
        for index in range(self._plan.grad_accum):
            self._clock.enter("forward")
            if index > 0:
                self._engine.step()
            losses, balance = compute_losses(self.objective, self._engine_network, batch.micro(index))
            loss = losses.total
            self._clock.lap("forward", then="comm")
            num_valid = totals.num_valid()
            self._clock.lap("comm", then="backward")
            self._engine.backward((loss + balance) * (self._plan.mesh.data / num_valid), scale_wrt_gas=False)
            total += loss.detach()
            parts.add(losses)
            self._clock.lap("backward", then="comm")
        self._reduced = totals.reduce(total, parts, [self._network])
        self._clock.lap("comm")
        return self._reduced.numbers

    def update(self, lr: float) -> tuple[Tensor, Tensor]:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr * group[LR_FACTOR]
        if self._plan.precision == "fp16":
            self._update_details = {"loss_scale": float(self._engine.optimizer.loss_scale)}
        if self._plan.sharding == "none":  # plain AdamW: gradients are unsharded and already averaged
            self._norm = gradient_norm([*self._engine.module.parameters()])
            self._engine.step()
        else:
            self._norm = None
            self._engine.step()
            self._norm = torch.as_tensor(self._engine.get_global_grad_norm(), device=self._device)
        refused = self._guard.refuses(self._mean_loss, self._norm)
        assert self._reduced is not None
        balance_routers([self._network], self._reduced.routing, refused)
        return self._norm, refused

    @property
    def _mean_loss(self) -> Tensor:
        """The mean loss of the step over all ranks."""
        assert self._reduced is not None, "an update follows a step"
        return self._reduced.numbers[0]

    def numbers_later(self, norm: Tensor, refused: Tensor) -> Callable[[], list[float]]:
        assert self._reduced is not None
        return self._reduced.numbers_later(norm, refused)

    def details(self) -> DetailsReader:
        assert self._reduced is not None
        update_details, step_details = self._update_details, self._reduced.details
        return lambda: update_details | step_details()

    def evaluate(self, batch: StepBatch) -> Tensor:
        rows = [
            evaluate_micro_batch(self.objective, self._engine_network, batch.micro(index))
            for index in range(self._plan.grad_accum)
        ]
        return mask_duplicates(torch.stack(rows).sum(0), self._ranks)

    def next_token_logits(self, ids: Tensor) -> Tensor:
        return compute_next_token_logits(self._engine_network, self._ranks, ids)

    def next_token_function(self) -> Callable[[Tensor], Tensor]:
        """See `Stepper.next_token_function`. DeepSpeed's engine runs the whole sequence for each token."""
        return self.next_token_logits

    @torch.no_grad()
    def predict_tokens(self, inputs: Inputs) -> Tensor:
        return predicted_tokens(self._network, self._engine_network.forward(inputs)[0]).cpu()

    def set_training(self, training: bool) -> None:
        self._engine.train(training)

    def full_tensor(self, parameter: Tensor) -> Tensor:
        """See `Stepper.full_tensor`. A frozen parameter and a buffer have no other values than their own."""
        import deepspeed  # noqa: PLC0415  an optional package

        if not isinstance(parameter, nn.Parameter):
            return full_tensor(parameter)
        value = deepspeed.utils.safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if value is not None:
            return full_tensor(value.view(getattr(parameter, "ds_shape", parameter.shape)))
        with deepspeed.zero.GatheredParameters(parameter):
            return full_tensor(parameter.detach().clone())

    def state(self, train: TrainSection, *, without_base: bool = False) -> CheckpointState:
        assert not without_base, "DeepSpeed does not train adapters here"
        return deepspeed_state(self._network.module, self._engine, train, {"guard": self._guard})

    def _set_found_inf(self, optimizer: Any, *_: Any) -> None:
        """Set `found_inf` of torch's AdamW before it updates a group of weights: 1.0 if the guard refuses the step."""
        norm = self._norm
        if norm is None:  # under ZeRO, DeepSpeed has just computed it
            norm = torch.as_tensor(self._engine.optimizer._global_grad_norm, device=self._device)
        # ZeRO-3 updates one group at a time and leaves the others empty.
        device = next(each for group in optimizer.param_groups for each in group["params"]).device
        optimizer.found_inf = self._guard.refuses(self._mean_loss, norm).to(device)


def build_stepper(context: StepperContext) -> DeepSpeedStepper:
    """Return the stepper that trains with DeepSpeed, which moves the unsharded CPU weights and shards them.

    DeepSpeed first rounds weights to the plan's precision and derives its fp32 weights from the rounded ones. Ours
    replace them afterwards, so that every plan starts from the same weights.
    """
    network, train, plan, ranks = context.networks[0], context.train, context.plan, context.ranks
    device = ranks.axes.device_type
    deepspeed = load_deepspeed(device)
    config = deepspeed_config(plan, train, pin_memory=DEVICE_TRAITS[device].has_own_memory)
    trained = {name: each for name, each in network.module.named_parameters() if each.requires_grad}
    fp32_weights = {name: each.data for name, each in trained.items()} if plan.precision != "fp32" else {}
    with redirect_stdout(StringIO()) as output:
        engine, *_ = deepspeed.initialize(
            model=network.module,
            model_parameters=decay_groups({each: name for name, each in trained.items()}, train, network.towers),
            config=config,
            dist_init_required=False,  # the process group exists already
        )
    log.debug(output.getvalue())
    for name, each in network.module.named_parameters():
        if name in fp32_weights:
            _set_fp32_weights(deepspeed, each, fp32_weights.pop(name))
    return DeepSpeedStepper(network, plan, ranks, engine, context.clock, context.guard, context.objective)


def load_deepspeed(device: str) -> ModuleType:
    """Return the deepspeed package. Its import takes seconds and chooses a device, so it is imported only if needed."""
    try:
        import deepspeed  # noqa: PLC0415
        from deepspeed.accelerator import get_accelerator  # noqa: PLC0415
    except ImportError as error:
        raise deepspeed_missing(str(error)) from error
    except ValueError as error:
        raise _wrong_device(str(error), device) from error
    chosen = get_accelerator().device_name()
    if chosen != device:
        raise _wrong_device(f"DeepSpeed has chosen to compute on {chosen}, and this run computes on {device}", device)
    # On a CPU, DeepSpeed would compile a shared-memory all-reduce at the first start. gloo does not need it.
    deepspeed.ops.__compatible_ops__ = {}  # pyrefly: ignore[missing-attribute]
    # DeepSpeed calls collectives by names that torch 2.13 deprecates, with a warning at every call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed


def _wrong_device(what: str, device: str) -> UserError:
    return UserError("P038", what, where="DS_ACCELERATOR", fix=f"set DS_ACCELERATOR={device}, or leave it out")


def _set_fp32_weights(deepspeed: Any, parameter: nn.Parameter, value: Tensor) -> None:
    """Replace the fp32 weights that the optimizer updates by this rank's partition of `value`."""
    partition: Any = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return deepspeed.utils.safe_set_full_fp32_param(parameter, value)
    # ZeRO-3 pads the last partition; `safe_set_full_fp32_param` fails on that.
    size = partition.numel()
    pad_to_even_shards = F.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
    return deepspeed.utils.safe_set_local_fp32_param(parameter, pad_to_even_shards[size * dist.get_rank() :][:size])
