"""The DeepSpeed engine: its stepper, and its checkpoint state, which is views of fp32 weights and moments, no copy."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from math import prod
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from trimaran.core import DEVICE_TRAITS, TrainSection, UserError, deepspeed_config, deepspeed_missing
from trimaran.data import Inputs, StepBatch
from trimaran.nets import full_tensor
from trimaran.parallel import (
    LR_FACTOR,
    MOMENTS,
    CheckpointState,
    TensorIndex,
    TensorShard,
    check_moment_format,
    decay_groups,
    gradient_norm,
)
from trimaran.train.checkpointing.training_state import (
    TrainingCounter,
    TrainingState,
    local_shard,
    persistent_buffers,
    progress_of,
    restore_counters,
    saved_settings,
)
from trimaran.train.loss.objective import predicted_tokens
from trimaran.train.metrics.router_stats import balance_routers
from trimaran.train.steppers.engine import StepperContext
from trimaran.train.steppers.step_totals import LossPartSums, StepTotals
from trimaran.train.steppers.stepper import (
    NO_REQUESTS,
    DetailsReader,
    Stepper,
    compute_losses,
    compute_next_token_logits,
    evaluate_micro_batch,
    mask_duplicates,
)

RegionBounds = tuple[tuple[int, ...], tuple[int, ...]]  # start and size of a rectangular region of a tensor


class DeepSpeedLossScale:
    """DeepSpeed's loss scale, with the state format of `optim.loss_scale`."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def state(self) -> dict[str, Any]:
        good_steps = self._scaler.cur_iter - self._scaler.last_overflow_iter - 1
        return {"value": float(self._scaler.cur_scale), "good_steps": good_steps % self._scaler.scale_window}

    def restore(self, state: Mapping[str, Any]) -> None:
        scaler = self._scaler
        scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = state["value"], state["good_steps"], -1


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """The values of a parameter, from `first` on in memory order, that this rank updates, with their moments."""

    name: str
    shape: tuple[int, ...]
    first: int
    weights: Tensor
    states: Mapping[str, Tensor]

    def shards(self) -> Iterator[TensorShard]:
        moments = {f"optimizer/{key}/{self.name}": self.states[key] for key in MOMENTS}
        for key, values in ({f"model/{self.name}": self.weights} | moments).items():
            for start, size in regions_of_range(self.shape, self.first, self.first + len(values)):
                flat_index = sum(at * prod(self.shape[dim + 1 :]) for dim, at in enumerate(start))
                offset = flat_index - self.first
                tensor = values[offset : offset + prod(size)].view(size)
                yield TensorShard(key=key, tensor=tensor, shape=self.shape, start=start)
        step = self.states["step"]
        yield TensorShard(key=f"optimizer/step/{self.name}", tensor=step, shape=(), start=())


class ZeroTrainingState:
    """The state under ZeRO 1 to 3, see `CheckpointState`. All shards are views of DeepSpeed's memory.

    DeepSpeed concatenates parameters and assigns each rank a range, which may begin inside a row. The range of a
    parameter is then a few rectangular regions.
    """

    def __init__(
        self, module: nn.Module, optimizer: Any, *, counters: Mapping[str, TrainingCounter], settings: Mapping[str, Any]
    ) -> None:
        self._module, self._optimizer, self._counters, self._settings = module, optimizer, counters, settings
        self._shards: list[TensorShard] = []

    def shards(self) -> list[TensorShard]:
        if not self._shards:
            # Create the moments that torch's AdamW would create at its first step, so that a restore can fill them.
            optimizer = self._optimizer
            # The fp32 tensors that torch's optimizer updates: one per group, or under ZeRO-3 one per subgroup.
            group_tensors = [each for group in optimizer.optimizer.param_groups for each in group["params"]]
            for flat in getattr(optimizer, "fp32_partitioned_groups_flat", group_tensors):
                if not optimizer.optimizer.state[flat]:
                    step = torch.zeros((), dtype=torch.float32, device=flat.device)
                    optimizer.optimizer.state[flat] = {"step": step} | {key: torch.zeros_like(flat) for key in MOMENTS}
            if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
                optimizer._lazy_init_hp_params_optimizer_state()
            trained = [(name, each) for name, each in self._module.named_parameters() if each.requires_grad]
            ranges = _zero3_ranges if hasattr(self._optimizer, "fp32_partitioned_groups_flat") else _zero12_ranges
            self._shards = [shard for each in ranges(self._optimizer, trained) for shard in each.shards()]
            for name, each in self._module.named_parameters():
                if not each.requires_grad:
                    assert not hasattr(each, "ds_tensor"), f"{name} is frozen and sharded, which is not supported"
                    self._shards.append(local_shard(f"model/{name}", each, frozen=True))
            for name, each in persistent_buffers(self._module):
                self._shards.append(local_shard(f"model/{name}", each, frozen=False))
        return self._shards

    def shards_from(self, index: TensorIndex) -> list[TensorShard]:
        for shard in self.shards():
            check_moment_format(shard, index)
        return self.shards()

    def gather(self) -> None:
        pass

    def progress(self) -> dict[str, Any]:
        return progress_of(self._settings, self._counters)

    def restore(self, progress: Mapping[str, Any]) -> None:
        """See `CheckpointState.restore`. The low-precision weights are rounded again from the restored fp32 weights."""
        restore_counters(progress, self._counters)
        if hasattr(self._optimizer, "update_lp_params"):
            self._optimizer.update_lp_params()
            return
        for number in range(len(self._optimizer.fp32_partitioned_groups_flat)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if unsharded := self._optimizer.persistent_parameters:
            unsharded[0].all_gather(unsharded)


def _zero12_ranges(optimizer: Any, trained: list[tuple[str, nn.Parameter]]) -> Iterator[ParameterRange]:
    for name, each in trained:
        mapping: Any = each._hp_mapping  # pyrefly: ignore[missing-attribute]
        if mapping is not None:
            (flat,) = optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
            moments = {key: mapping.get_hp_fragment(key) for key in MOMENTS}
            states = {"step": optimizer.optimizer.state[flat]["step"]} | moments
            first = mapping.lp_fragment_address.start
            yield ParameterRange(name, tuple(each.shape), first, mapping.hp_fragment.detach(), states)


def _zero3_ranges(optimizer: Any, trained: list[tuple[str, nn.Parameter]]) -> Iterator[ParameterRange]:
    for name, each in trained:
        group, offset, size = optimizer.grad_position[optimizer.get_param_id(each)]
        flat = optimizer.fp32_partitioned_groups_flat[group]
        first = size * optimizer._get_param_partition_rank(each)
        length = max(0, min(size, each.ds_numel - first))  # pyrefly: ignore[missing-attribute]
        if length:  # the last partition is padded
            state = optimizer.optimizer.state[flat]
            states = {"step": state["step"]} | {key: state[key][offset : offset + length] for key in MOMENTS}
            weights = flat.detach()[offset : offset + length]
            yield ParameterRange(name, tuple(each.ds_shape), first, weights, states)  # pyrefly: ignore[missing-attribute]


def regions_of_range(shape: tuple[int, ...], first: int, last: int) -> Iterator[RegionBounds]:
    """Yield the rectangular regions that hold the values `first` to `last` (exclusive) of a tensor, in memory order."""
    if first >= last:
        return
    if len(shape) < 2:
        yield ((first,), (last - first,)) if shape else ((), ())
        return
    inner = prod(shape[1:])
    begin, end = -(-first // inner), last // inner  # the complete rows
    if begin > end:  # the range is inside one row
        yield from _regions_in_row(shape, end, first, last)
        return
    yield from _regions_in_row(shape, begin - 1, first, begin * inner)
    if begin < end:
        yield (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])
    yield from _regions_in_row(shape, end, end * inner, last)


def _regions_in_row(shape: tuple[int, ...], row: int, first: int, last: int) -> Iterator[RegionBounds]:
    base = row * prod(shape[1:])
    for start, size in regions_of_range(shape[1:], first - base, last - base):
        yield (row, *start), (1, *size)


log = logging.getLogger(__name__)


class EngineModule:
    """A module whose calls go through DeepSpeed's engine. All other attributes are the module's own."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.module, name)


class DeepSpeedStepper(Stepper):
    """Runs each micro-batch through the engine. The engine owns the weights; parameter names stay the network's.

    DeepSpeed counts micro-batches itself: its `step` is called after each, and updates the weights after the last. It
    skips steps whose gradient overflows in fp16. The guard's decision goes to the inner optimizer as `found_inf`.
    """

    def __init__(self, context: StepperContext, engine: Any) -> None:
        engine_module: Any = EngineModule(engine)
        self._network, self._plan, self._ranks = context.networks[0], context.plan, context.ranks
        self._engine_network = replace(self._network, module=engine_module)
        self._clock, self._guard, self.objective = context.clock, context.guard, context.objective
        self._engine, self._device = engine, engine.device
        engine.basic_optimizer.register_step_pre_hook(self._set_found_inf)
        self._update_details: dict[str, Any] = {}
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
        assert self._reduced is not None, "an update follows a step"
        refused = self._guard.refuses(self._reduced.numbers[0], self._norm)
        balance_routers([self._network], self._reduced.routing, refused)
        return self._norm, refused

    def details(self) -> DetailsReader:
        assert self._reduced is not None
        update_details, step_details = self._update_details, self._reduced.details
        return lambda: update_details | step_details()

    def evaluate(self, batch: StepBatch) -> Tensor:
        micro_batches = (batch.micro(index) for index in range(self._plan.grad_accum))
        rows = [evaluate_micro_batch(self.objective, self._engine_network, each) for each in micro_batches]
        return mask_duplicates(torch.stack(rows).sum(0), self._ranks)

    def next_token_logits(self, ids: Tensor) -> Tensor:
        return compute_next_token_logits(self._engine_network, self._ranks, ids)

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
        # The state of a network that `engine` trains. Without ZeRO: torch's AdamW and unsharded weights.
        counters = {"guard": self._guard}
        optimizer = self._engine.optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            return TrainingState([self._network.module], optimizer, counters=counters, settings=saved_settings(train))
        scaler = getattr(optimizer, "loss_scaler", None)
        scale = {"loss_scale": DeepSpeedLossScale(scaler)} if getattr(scaler, "dynamic", False) else {}
        return ZeroTrainingState(
            self._network.module, optimizer, counters={**counters, **scale}, settings=saved_settings(train)
        )

    def _set_found_inf(self, optimizer: Any, *_: Any) -> None:
        """Set `found_inf` of torch's AdamW before it updates a group of weights: 1.0 if the guard refuses the step."""
        norm = self._norm
        if norm is None:  # under ZeRO, DeepSpeed has just computed it
            norm = torch.as_tensor(self._engine.optimizer._global_grad_norm, device=self._device)
        # ZeRO-3 updates one group at a time and leaves the others empty.
        device = next(each for group in optimizer.param_groups for each in group["params"]).device
        assert self._reduced is not None, "an update follows a step"
        optimizer.found_inf = self._guard.refuses(self._reduced.numbers[0], norm).to(device)


def build_stepper(context: StepperContext) -> DeepSpeedStepper:
    """Return the stepper that trains with DeepSpeed, which moves the unsharded CPU weights and shards them.

    DeepSpeed first rounds weights to the plan's precision and derives its fp32 weights from the rounded ones. Ours
    replace them afterwards, so that every plan starts from the same weights.
    """
    network, train, plan = context.networks[0], context.train, context.plan
    device = context.ranks.axes.device_type
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
            value, partition = fp32_weights.pop(name), getattr(each, "ds_tensor", None)
            if partition is None:
                deepspeed.utils.safe_set_full_fp32_param(each, value)
            else:  # ZeRO-3 pads the last partition; `safe_set_full_fp32_param` fails on that
                size = partition.numel()
                padded = F.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
                deepspeed.utils.safe_set_local_fp32_param(each, padded[size * dist.get_rank() :][:size])
    return DeepSpeedStepper(context, engine)


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
