"""What an optimizer keeps of each parameter, as rectangles of named tensors."""

import logging
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from trimaran.checkpoint.rank_share import whole_of
from trimaran.checkpoint.tensor_regions import Index
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.core import UserError
from trimaran.nets.local_shards import local_part, local_slices
from trimaran.optim.adamw import LeanAdamW
from trimaran.optim.block_layout import SCALE, BlockLayout, BlockReshard, block_layout_of, saved_layouts
from trimaran.optim.split_weights import split_weights_of

log = logging.getLogger(__name__)

FORMATS = {"F32": "fp32", "BF16": "bf16", "U8": "8bit"}
MOMENTS = ("exp_avg", "exp_avg_sq")
LOW = "low"  # the lower half of a weight
Named = list[tuple[str, nn.Parameter]]


class OptimizerState:
    """The states of the parameters in `named`, in that order. One name may stand for two parameters that move alike."""

    def __init__(self, optimizer: Optimizer, named: Named) -> None:
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        self._optimizer, self._named = optimizer, [(name, each) for name, each in named if id(each) in trained]
        self._recuts: list[BlockReshard] = []

    def tensors(self) -> Iterator[Tensor]:
        """Yield the memory of all states, for who wants to know whether it has moved."""
        for _, parameter in self._named:
            yield from (value for value in self._optimizer.state[parameter].values() if isinstance(value, Tensor))

    def pieces(self) -> Iterator[TensorShard]:
        """Yield the states that are there: AdamW's always, those of others after their first step."""
        return (piece for _, piece in self._every())

    def pieces_from(self, index: Index) -> Iterator[TensorShard]:
        """Yield what is to be filled from a state with this index, then `settle`; see `State.pieces_from`."""
        self._create_moments()
        if not isinstance(self._optimizer, (Adam, AdamW, LeanAdamW)):
            self._create_by_a_step(index)
        grids, self._recuts = saved_layouts(index), []
        for parameter, piece in self._every():
            refuse_format(piece, index)
            state, name = _state_and_name(piece)
            kept = grids.get((state, name))
            if piece.key in index or kept is None:
                yield piece
            else:
                yield self._recut(piece, parameter, *kept)

    def settle(self) -> None:
        """Make states that were cut elsewhere into those of this rank."""
        for recut in self._recuts:
            recut.settle()
        if self._recuts:
            log.warning("%d eight-bit optimizer states were cut at other columns; rounded once more", len(self._recuts))
        self._recuts = []

    def numbers(self) -> dict[str, dict[str, float]]:
        """Return the states that are no tensors, by parameter."""
        every = {name: self._optimizer.state[parameter] for name, parameter in self._named}
        plain = {
            name: {key: value for key, value in states.items() if isinstance(value, (bool, int, float))}
            for name, states in every.items()
        }
        return {name: states for name, states in plain.items() if states}

    def restore_numbers(self, numbers: Mapping[str, Mapping[str, float]]) -> None:
        for name, parameter in self._named:
            self._optimizer.state[parameter].update(numbers.get(name, {}))

    def wait(self) -> None:
        """Return when the states are where they belong: those on the host may be on their way."""
        if isinstance(self._optimizer, LeanAdamW):
            self._optimizer.wait()

    def _every(self) -> Iterator[tuple[nn.Parameter, TensorShard]]:
        self._create_moments()
        in_blocks = isinstance(self._optimizer, LeanAdamW)
        for name, parameter in self._named:
            for state, value in self._optimizer.state[parameter].items():
                if state == LOW and split_weights_of(parameter) is not None:
                    continue  # a part of the weight, which is kept whole
                if isinstance(value, Tensor) and (local := local_part(value)).numel():
                    scales = in_blocks and state.endswith(SCALE)
                    place = _place_of_scales(parameter) if scales else _place(parameter, local, f"{state} of {name}")
                    grid, shape, start = place
                    key = f"optimizer/{state}{grid}/{name}"
                    yield parameter, TensorShard(key=key, tensor=local, shape=shape, start=start)

    def _create_moments(self) -> None:
        """Make what torch's AdamW makes at its first step, so that there is something to fill."""
        if not isinstance(self._optimizer, (Adam, AdamW)):
            return
        for group in self._optimizer.param_groups:
            keys = (*MOMENTS, "max_exp_avg_sq") if group["amsgrad"] else MOMENTS
            for each in (each for each in group["params"] if not self._optimizer.state[each]):
                on_device = group["fused"] or group["capturable"]
                step = torch.zeros((), dtype=torch.float32, device=each.device if on_device else "cpu")
                zeros = {key: torch.zeros_like(each, memory_format=torch.preserve_format) for key in keys}
                self._optimizer.state[each] = {"step": step} | zeros

    def _create_by_a_step(self, index: Index) -> None:
        """Let any optimizer make its states: a step at no learning rate on gradients of zeros moves no weight."""
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            for each in group["params"]:
                each.grad = torch.zeros_like(each)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        have = {key.split("/", 2)[2] for key in index if key.startswith("optimizer/")}
        for name, parameter in self._named:
            if name not in have:  # saved before its first step
                self._optimizer.state[parameter].clear()

    def _recut(self, piece: TensorShard, parameter: nn.Parameter, kept_key: str, width: int) -> TensorShard:
        """Return the piece of the scales as they were kept. They are made into `piece` when all is filled."""
        moment = _state_and_name(piece)[0].removesuffix(SCALE)
        here, columns = local_slices(parameter)[-1], parameter.shape[-1]
        grid = BlockLayout(columns, width or columns)
        first, last = grid.block(here.start), grid.block(here.stop - 1)
        scales = piece.tensor
        assert isinstance(scales, Tensor), "states are kept as they are"
        kept = scales.new_empty((*scales.shape[:-1], last - first + 1))
        recut = BlockReshard(
            codes=self._optimizer.state[parameter][moment],
            scales=scales,
            kept=kept,
            grid=grid,
            columns=range(here.start, here.stop),
            signed=moment == MOMENTS[0],
        )
        self._recuts.append(recut)
        shape, start = (*piece.shape[:-1], grid.num_blocks), (*piece.start[:-1], first)
        return TensorShard(key=kept_key, tensor=kept, shape=shape, start=start)


Place = tuple[str, tuple[int, ...], tuple[int, ...]]
"""The grid's name, the shape of the whole, and where in it this rank's part begins."""


def _place(parameter: Tensor, value: Tensor, what: str) -> Place:
    """Return where in its whole a state lies: as its parameter does, or it is whole on every rank."""
    here = local_slices(parameter)
    size = tuple(each.stop - each.start for each in here)
    if value.shape == size:
        return "", tuple(parameter.shape), tuple(each.start for each in here)
    if value.ndim == 0 or not isinstance(parameter, DTensor):
        return "", tuple(value.shape), (0,) * value.ndim
    raise UserError("K031", f"the optimizer keeps {what} as {list(value.shape)}, and this rank has {list(size)} of its "
                    f"{list(parameter.shape)}", where="optimizer",
                    fix="use an optimizer whose states are shaped as the parameters, such as AdamW or SGD, or "
                    "prepare(sharding='none')")  # fmt: skip


def _place_of_scales(parameter: Tensor) -> Place:
    grid, start = block_layout_of(parameter), tuple(each.start for each in local_slices(parameter))
    return grid.name, (*parameter.shape[:-1], grid.num_blocks), (*start[:-1], grid.block(start[-1]))


def _state_and_name(piece: TensorShard) -> tuple[str, str]:
    _, state, name = piece.key.split("/", 2)
    return state.partition("@")[0], name


def refuse_format(piece: TensorShard, index: Index) -> None:
    """Raise when the moments were kept in another format than this run's."""
    entry = index.get(piece.key)
    if entry is None or piece.key.split("/")[1] not in MOMENTS:
        return
    here, there = (FORMATS.get(each, each) for each in (whole_of(piece).dtype, entry.whole.dtype))
    if here != there:
        raise UserError("K030", f"the checkpoint has the optimizer's moments in {there}, this run keeps them in {here}",
                        where="train.optimizer.states", fix=f"set train.optimizer.states to {there}")  # fmt: skip
