"""What is kept of a network that DeepSpeed trains: its fp32 weights and moments, where they are, without a copy."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.checkpoint.tensor_regions import Index
from trimaran.checkpoint.tensor_shards import State, TensorShard
from trimaran.core import TrainSection
from trimaran.optim.optimizer_state import MOMENTS, refuse_format
from trimaran.train.checkpointing.training_state import (
    Counter,
    TrainingState,
    facts_of,
    persistent_buffers,
    piece_of,
    progress_of,
    restore_counters,
)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and size of a rectangle."""


def deepspeed_state(module: nn.Module, engine: Any, train: TrainSection, counters: Mapping[str, Counter]) -> State:
    """Return the state of a network that `engine` trains; without ZeRO that is torch's AdamW and whole weights."""
    optimizer = engine.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return TrainingState([module], optimizer, counters=counters, facts=facts_of(train))
    scaler = getattr(optimizer, "loss_scaler", None)
    scale = {"loss_scale": Scaler(scaler)} if getattr(scaler, "dynamic", False) else {}
    return ZeroState(module, optimizer, counters={**counters, **scale}, facts=facts_of(train))


class Scaler:
    """DeepSpeed's loss scale, told as our own is."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def state(self) -> dict[str, Any]:
        good_steps = self._scaler.cur_iter - self._scaler.last_overflow_iter - 1
        return {"value": float(self._scaler.cur_scale), "good_steps": good_steps % self._scaler.scale_window}

    def restore(self, state: Mapping[str, Any]) -> None:
        scaler = self._scaler
        scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = state["value"], state["good_steps"], -1


@dataclass(frozen=True, slots=True)
class Fragment:
    """Values of one parameter that this rank moves: a stretch of them in memory order, from `first` on.

    `states` are the moments of the same values, and the step.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    weights: Tensor
    states: Mapping[str, Tensor]

    def pieces(self) -> Iterator[TensorShard]:
        moments = {f"optimizer/{key}/{self.name}": self.states[key] for key in MOMENTS}
        for key, values in ({f"model/{self.name}": self.weights} | moments).items():
            for start, size in boxes(self.shape, self.first, self.first + len(values)):
                offset = _flat(self.shape, start) - self.first
                tensor = values[offset : offset + prod(size)].view(size)
                yield TensorShard(key=key, tensor=tensor, shape=self.shape, start=start)
        step = self.states["step"]
        yield TensorShard(key=f"optimizer/step/{self.name}", tensor=step, shape=(), start=())


class ZeroState:
    """The state under ZeRO 1 to 3, see `checkpoint.pieces.State`.

    DeepSpeed strings parameters together and gives each rank a stretch of them, which may begin inside a row: a part of
    a parameter is then up to a few rectangles. They are views of DeepSpeed's own memory.
    """

    def __init__(
        self, module: nn.Module, optimizer: Any, *, counters: Mapping[str, Counter], facts: Mapping[str, Any]
    ) -> None:
        self._module, self._optimizer, self._counters, self._facts = module, optimizer, counters, facts
        self._pieces: list[TensorShard] = []

    def pieces(self) -> list[TensorShard]:
        if not self._pieces:
            _create_moments(self._optimizer)
            trained = [(name, each) for name, each in self._module.named_parameters() if each.requires_grad]
            fragments = _third_stage if hasattr(self._optimizer, "fp32_partitioned_groups_flat") else _first_stages
            self._pieces = [piece for each in fragments(self._optimizer, trained) for piece in each.pieces()]
            self._pieces += self._rest()
        return self._pieces

    def pieces_from(self, index: Index) -> list[TensorShard]:
        for piece in self.pieces():
            refuse_format(piece, index)
        return self.pieces()

    def gather(self) -> None:
        pass

    def progress(self) -> dict[str, Any]:
        return progress_of(self._facts, self._counters)

    def restore(self, progress: Mapping[str, Any]) -> None:
        """See `State.restore`. The weights that are computed with are rounded anew from those that were filled."""
        restore_counters(progress, self._counters)
        if hasattr(self._optimizer, "update_lp_params"):
            self._optimizer.update_lp_params()
            return
        for number in range(len(self._optimizer.fp32_partitioned_groups_flat)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if whole := self._optimizer.persistent_parameters:
            whole[0].all_gather(whole)

    def _rest(self) -> Iterator[TensorShard]:
        """Yield what is not trained."""
        for name, each in self._module.named_parameters():
            if not each.requires_grad:
                assert not hasattr(each, "ds_tensor"), f"{name} is frozen and split, which nobody has asked for yet"
                yield piece_of(f"model/{name}", each, frozen=True)
        for name, each in persistent_buffers(self._module):
            yield piece_of(f"model/{name}", each, frozen=False)


def _create_moments(optimizer: Any) -> None:
    """Make what torch's AdamW makes of each flat tensor at its first step, so that there is something to fill."""
    for flat in _flat_tensors(optimizer):
        if not optimizer.optimizer.state[flat]:
            step = torch.zeros((), dtype=torch.float32, device=flat.device)
            optimizer.optimizer.state[flat] = {"step": step} | {key: torch.zeros_like(flat) for key in MOMENTS}
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()


def _flat_tensors(optimizer: Any) -> list[Tensor]:
    """Return the fp32 tensors that torch's optimizer moves: one a group, or under ZeRO-3 one a subgroup."""
    of_groups = [each for group in optimizer.optimizer.param_groups for each in group["params"]]
    return getattr(optimizer, "fp32_partitioned_groups_flat", of_groups)


def _first_stages(optimizer: Any, trained: list[tuple[str, nn.Parameter]]) -> Iterator[Fragment]:
    for name, each in trained:
        mapping: Any = each._hp_mapping  # pyrefly: ignore[missing-attribute]
        if mapping is not None:
            (flat,) = optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
            moments = {key: mapping.get_hp_fragment(key) for key in MOMENTS}
            states = {"step": optimizer.optimizer.state[flat]["step"]} | moments
            first = mapping.lp_fragment_address.start
            yield Fragment(name, tuple(each.shape), first, mapping.hp_fragment.detach(), states)


def _third_stage(optimizer: Any, trained: list[tuple[str, nn.Parameter]]) -> Iterator[Fragment]:
    for name, each in trained:
        group, offset, size = optimizer.grad_position[optimizer.get_param_id(each)]
        flat = optimizer.fp32_partitioned_groups_flat[group]
        first = size * optimizer._get_param_partition_rank(each)
        here = max(0, min(size, each.ds_numel - first))  # pyrefly: ignore[missing-attribute]
        if here:  # the last part is filled up
            kept = optimizer.optimizer.state[flat]
            states = {"step": kept["step"]} | {key: kept[key][offset : offset + here] for key in MOMENTS}
            weights = flat.detach()[offset : offset + here]
            yield Fragment(name, tuple(each.ds_shape), first, weights, states)  # pyrefly: ignore[missing-attribute]


def boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """Yield the rectangles that the values `first` to `last` (exclusive) of a tensor make up, in memory order."""
    if first >= last:
        return
    if len(shape) < 2:
        yield ((first,), (last - first,)) if shape else ((), ())
        return
    inner = prod(shape[1:])
    begin, end = -(-first // inner), last // inner  # the rows that are here whole
    if begin > end:  # all of it is inside one row
        yield from _in_row(shape, end, first, last)
        return
    yield from _in_row(shape, begin - 1, first, begin * inner)
    if begin < end:
        yield (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])
    yield from _in_row(shape, end, end * inner, last)


def _in_row(shape: tuple[int, ...], row: int, first: int, last: int) -> Iterator[Box]:
    base = row * prod(shape[1:])
    for start, size in boxes(shape[1:], first - base, last - base):
        yield (row, *start), (1, *size)


def _flat(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    """Return where in memory order a value lies."""
    place = 0
    for size, each in zip(shape, index, strict=True):
        place = place * size + each
    return place
