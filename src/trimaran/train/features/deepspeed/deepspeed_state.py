"""The checkpoint state of a network that DeepSpeed trains: views of its fp32 weights and moments, without a copy."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import TrainSection
from trimaran.parallel.optimizer.optimizer_state import MOMENTS, check_moment_format
from trimaran.parallel.tensor_regions import TensorIndex
from trimaran.parallel.tensor_shards import CheckpointState, TensorShard
from trimaran.train.checkpointing.training_state import (
    TrainingCounter,
    TrainingState,
    local_shard,
    persistent_buffers,
    progress_of,
    restore_counters,
    saved_settings,
)

RegionBounds = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and size of a rectangular region of a tensor."""


def deepspeed_state(
    module: nn.Module, engine: Any, train: TrainSection, counters: Mapping[str, TrainingCounter]
) -> CheckpointState:
    """Return the state of a network that `engine` trains. Without ZeRO: torch's AdamW and unsharded weights."""
    optimizer = engine.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return TrainingState([module], optimizer, counters=counters, settings=saved_settings(train))
    scaler = getattr(optimizer, "loss_scaler", None)
    scale = {"loss_scale": DeepSpeedLossScale(scaler)} if getattr(scaler, "dynamic", False) else {}
    return ZeroTrainingState(module, optimizer, counters={**counters, **scale}, settings=saved_settings(train))


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
    """The values of one parameter that this rank updates: a contiguous range in memory order, starting at `first`.

    `states` holds the moments of the same values, and the step.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    weights: Tensor
    states: Mapping[str, Tensor]

    def shards(self) -> Iterator[TensorShard]:
        moments = {f"optimizer/{key}/{self.name}": self.states[key] for key in MOMENTS}
        for key, values in ({f"model/{self.name}": self.weights} | moments).items():
            for start, size in regions_of_range(self.shape, self.first, self.first + len(values)):
                offset = _flat_index(self.shape, start) - self.first
                tensor = values[offset : offset + prod(size)].view(size)
                yield TensorShard(key=key, tensor=tensor, shape=self.shape, start=start)
        step = self.states["step"]
        yield TensorShard(key=f"optimizer/step/{self.name}", tensor=step, shape=(), start=())


class ZeroTrainingState:
    """The state under ZeRO 1 to 3, see `checkpoint.tensor_shards.CheckpointState`.

    DeepSpeed concatenates parameters and assigns each rank a range, which may begin inside a row. The range of a
    parameter is then a few rectangular regions. All shards are views of DeepSpeed's memory.
    """

    def __init__(
        self, module: nn.Module, optimizer: Any, *, counters: Mapping[str, TrainingCounter], settings: Mapping[str, Any]
    ) -> None:
        self._module, self._optimizer, self._counters, self._settings = module, optimizer, counters, settings
        self._shards: list[TensorShard] = []

    def shards(self) -> list[TensorShard]:
        if not self._shards:
            _create_moments(self._optimizer)
            trained = [(name, each) for name, each in self._module.named_parameters() if each.requires_grad]
            ranges = _zero3_ranges if hasattr(self._optimizer, "fp32_partitioned_groups_flat") else _zero12_ranges
            self._shards = [shard for each in ranges(self._optimizer, trained) for shard in each.shards()]
            self._shards += self._untrained_shards()
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

    def _untrained_shards(self) -> Iterator[TensorShard]:
        """Yield frozen parameters and buffers."""
        for name, each in self._module.named_parameters():
            if not each.requires_grad:
                assert not hasattr(each, "ds_tensor"), f"{name} is frozen and sharded, which is not supported"
                yield local_shard(f"model/{name}", each, frozen=True)
        for name, each in persistent_buffers(self._module):
            yield local_shard(f"model/{name}", each, frozen=False)


def _create_moments(optimizer: Any) -> None:
    """Create the moments that torch's AdamW would create at its first step, so that a restore can fill them."""
    for flat in _flat_tensors(optimizer):
        if not optimizer.optimizer.state[flat]:
            step = torch.zeros((), dtype=torch.float32, device=flat.device)
            optimizer.optimizer.state[flat] = {"step": step} | {key: torch.zeros_like(flat) for key in MOMENTS}
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()


def _flat_tensors(optimizer: Any) -> list[Tensor]:
    """Return the fp32 tensors that torch's optimizer updates: one per group, or under ZeRO-3 one per subgroup."""
    group_tensors = [each for group in optimizer.optimizer.param_groups for each in group["params"]]
    return getattr(optimizer, "fp32_partitioned_groups_flat", group_tensors)


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


def _flat_index(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    """Return the position of a value in memory order."""
    position = 0
    for size, each in zip(shape, index, strict=True):
        position = position * size + each
    return position
