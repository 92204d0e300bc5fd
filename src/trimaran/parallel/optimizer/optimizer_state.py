"""An optimizer's states as named tensor shards, and 8-bit block-wise quantization (arXiv 2110.02861)."""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, AdamW, Optimizer

from trimaran.core import UserError
from trimaran.nets import is_dtensor, local_part, local_slices
from trimaran.parallel.optimizer.build_optimizer import SplitWeightsOptimizer, split_weights_of
from trimaran.parallel.tensor_regions import TensorIndex
from trimaran.parallel.tensor_shards import TensorShard, meta_of

BLOCK = 256
DECADES = 7
SCALE_SUFFIX = "_scale"
SCALES_KEY = re.compile(r"optimizer/(\w+_scale)(?:@(\d+))?/(.+)", re.DOTALL)


@cache
def codebook(device: torch.device, *, signed: bool) -> Tensor:
    """Return the 256 ascending values of codes from -1 or 0 to 1 in seven decades; they equal those of bitsandbytes."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - DECADES + 1)).tolist()
        values += middles + [-each for each in middles] * signed
    return torch.tensor(sorted(values), device=device)


@cache
def lower_bounds(device: torch.device, *, signed: bool) -> Tensor:
    """Return for each of the 256 codes the least value that rounds to it: half way to the code below."""
    book = codebook(device, signed=signed)
    return torch.cat([book.new_full((1,), -torch.inf), (book[1:] + book[:-1]) / 2])


def num_blocks(width: int) -> int:
    """Return how many scales a row has. A block never crosses a row, so shards of full rows have the same blocks."""
    return -(-width // BLOCK)


def quantize(values: Tensor, book: Tensor, *, lowest: int = 0) -> tuple[Tensor, Tensor]:
    """Return uint8 codes, at least `lowest`, of a 2-D tensor by a `codebook`, and each block's largest magnitude."""
    blocks = _in_blocks(values)
    scales = blocks.abs().amax(-1)
    relative = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    codes = torch.bucketize(relative, (book[1:] + book[:-1]) / 2, right=True, out_int32=True)
    return codes.clamp(min=lowest).to(torch.uint8).flatten(1)[:, : values.shape[1]], scales


def dequantize(codes: Tensor, scales: Tensor, book: Tensor) -> Tensor:
    blocks = _in_blocks(book[codes.int()]) * scales[..., None]
    return blocks.flatten(1)[:, : codes.shape[1]]


def _in_blocks(table: Tensor) -> Tensor:
    """Return a 2-D tensor as [rows, blocks, values of a block]; the last block of a row is padded with zeros."""
    width = table.shape[1]
    block = min(BLOCK, width)
    padding = -width % block
    return (F.pad(table, (0, padding)) if padding else table).unflatten(1, (-1, block))


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The blocks of a tensor with `columns` columns that is sharded into `shard_columns` columns per rank.

    Each rank's first block starts at its first column. If all shards start at multiples of 256 columns, the blocks are
    those of the unsharded tensor. Otherwise the layout has a `suffix`, which is part of the checkpoint key of its
    scales.
    """

    columns: int
    shard_columns: int

    @property
    def num_blocks(self) -> int:
        full_shards, rest = divmod(self.columns, self.shard_columns)
        return full_shards * num_blocks(self.shard_columns) + num_blocks(rest)

    @property
    def suffix(self) -> str:
        is_unsharded = self.shard_columns == self.columns or self.shard_columns % BLOCK == 0
        return "" if is_unsharded else f"@{self.shard_columns}"

    def block(self, column: int) -> int:
        shard, inside = divmod(column, self.shard_columns)
        return shard * num_blocks(self.shard_columns) + inside // BLOCK


def block_layout(parameter: Tensor) -> BlockLayout:
    """Return the block layout of the states of `parameter`, which follows from how its last dimension is sharded."""
    columns, num_shards = parameter.shape[-1], 1
    if is_dtensor(parameter):
        sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        num_shards = prod(size for size, placement in sizes if placement.is_shard(parameter.ndim - 1))
    return BlockLayout(columns, -(-columns // num_shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReshard:
    """This rank's codes with the scales of another layout; `requantize` converts both to this rank's layout.

    `columns` are this rank's columns of the full tensor. `saved_scales` are those of all blocks that they overlap.
    """

    codes: Tensor
    scales: Tensor
    saved_scales: Tensor
    saved_layout: BlockLayout
    columns: range
    signed: bool

    def requantize(self) -> None:
        """Restore the values and quantize them again, since their blocks have other scales now."""
        book = codebook(self.codes.device, signed=self.signed)
        first = self.saved_layout.block(self.columns.start)
        numbers = [self.saved_layout.block(each) - first for each in self.columns]
        values = book[self.codes.int()] * self.saved_scales[..., torch.tensor(numbers, device=self.codes.device)]
        # A second moment never becomes zero, see `moments.EightBitMoments`.
        codes, scales = quantize(values.flatten(0, -2), book, lowest=0 if self.signed else 1)
        self.codes.copy_(codes.view(self.codes.shape))
        self.scales.copy_(scales.view(self.scales.shape))


log = logging.getLogger(__name__)

FORMAT_BY_DTYPE = {"F32": "fp32", "BF16": "bf16", "U8": "8bit"}
MOMENTS = ("exp_avg", "exp_avg_sq")
LOW = "low"  # the lower half of a split weight
NamedParameters = list[tuple[str, nn.Parameter]]


class OptimizerState:
    """The states of the parameters in `named`, in that order. One name may stand for two tied parameters."""

    def __init__(self, optimizer: Optimizer, named: NamedParameters) -> None:
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        self._optimizer, self._named = optimizer, [(name, each) for name, each in named if id(each) in trained]
        self._reshards: list[BlockReshard] = []
        self._split = split_weights_of(optimizer)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of all states, so that callers can tell whether their memory has changed."""
        for _, parameter in self._named:
            yield from (value for value in self._optimizer.state[parameter].values() if isinstance(value, Tensor))

    def shards(self) -> Iterator[TensorShard]:
        """Yield the existing states. AdamW's always exist, those of other optimizers after their first step."""
        return (shard for _, shard in self._all_shards())

    def shards_from(self, index: TensorIndex) -> Iterator[TensorShard]:
        """Yield what is to be filled from a state with this index, then `settle`; see `CheckpointState.shards_from`."""
        self._create_moments()
        if not isinstance(self._optimizer, (Adam, AdamW, SplitWeightsOptimizer)):
            self._create_by_a_step(index)
        matches = ((key, SCALES_KEY.fullmatch(key)) for key in index)
        # By state and parameter: the key of the saved scales and their shard columns; 0 if not sharded.
        layouts = {(match[1], match[3]): (key, int(match[2] or 0)) for key, match in matches if match is not None}
        self._reshards = []
        for parameter, shard in self._all_shards():
            check_moment_format(shard, index)
            state, name = _state_and_name(shard)
            saved = layouts.get((state, name))
            if shard.key in index or saved is None:
                yield shard
            else:
                yield self._reshard_scales(shard, parameter, *saved)

    def settle(self) -> None:
        """Convert states that were saved with other quantization blocks to those of this rank."""
        for reshard in self._reshards:
            reshard.requantize()
        if self._reshards:
            log.warning("%d 8-bit optimizer states were sharded at other columns; quantized again", len(self._reshards))
        self._reshards = []

    def numbers(self) -> dict[str, dict[str, float]]:
        """Return the states that are numbers rather than tensors, by parameter."""
        found = {}
        for name, parameter in self._named:
            states = self._optimizer.state[parameter].items()
            if numbers := {key: value for key, value in states if isinstance(value, (bool, int, float))}:
                found[name] = numbers
        return found

    def restore_numbers(self, numbers: Mapping[str, Mapping[str, float]]) -> None:
        for name, parameter in self._named:
            self._optimizer.state[parameter].update(numbers.get(name, {}))

    def wait(self) -> None:
        """Wait until states on the host have been copied back from the device."""
        if isinstance(self._optimizer, SplitWeightsOptimizer):
            self._optimizer.wait()

    def _all_shards(self) -> Iterator[tuple[nn.Parameter, TensorShard]]:
        self._create_moments()
        in_blocks = isinstance(self._optimizer, SplitWeightsOptimizer)
        for name, parameter in self._named:
            for state, value in self._optimizer.state[parameter].items():
                if state == LOW and parameter in self._split.lower_halves:
                    continue  # is saved with the weight, in fp32
                if isinstance(value, Tensor) and (local := local_part(value)).numel():
                    is_scale = in_blocks and state.endswith(SCALE_SUFFIX)
                    if is_scale:
                        layout, start = block_layout(parameter), tuple(each.start for each in local_slices(parameter))
                        suffix, shape = layout.suffix, (*parameter.shape[:-1], layout.num_blocks)
                        start = (*start[:-1], layout.block(start[-1]))
                    else:
                        suffix, (shape, start) = "", _position(parameter, local, state, name)
                    key = f"optimizer/{state}{suffix}/{name}"
                    yield parameter, TensorShard(key=key, tensor=local, shape=shape, start=start)

    def _create_moments(self) -> None:
        """Create the states that torch's AdamW creates at its first step, so that they can be filled."""
        if not isinstance(self._optimizer, (Adam, AdamW)):
            return
        for group in self._optimizer.param_groups:
            keys = (*MOMENTS, "max_exp_avg_sq") if group["amsgrad"] else MOMENTS
            for each in (each for each in group["params"] if not self._optimizer.state[each]):
                on_device = group["fused"] or group["capturable"]
                step = torch.zeros((), dtype=torch.float32, device=each.device if on_device else "cpu")
                zeros = {key: torch.zeros_like(each, memory_format=torch.preserve_format) for key in keys}
                self._optimizer.state[each] = {"step": step} | zeros

    def _create_by_a_step(self, index: TensorIndex) -> None:
        """Make any optimizer create its states, by a step with zero gradients and a learning rate of zero."""
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
        saved = {key.split("/", 2)[2] for key in index if key.startswith("optimizer/")}
        for name, parameter in self._named:
            if name not in saved:  # the checkpoint is from before its first step
                self._optimizer.state[parameter].clear()

    def _reshard_scales(
        self, shard: TensorShard, parameter: nn.Parameter, saved_key: str, shard_columns: int
    ) -> TensorShard:  # fmt: skip
        """Return a shard for the scales as they were saved. `settle` converts them to those of `shard`."""
        moment = _state_and_name(shard)[0].removesuffix(SCALE_SUFFIX)
        here, columns = local_slices(parameter)[-1], parameter.shape[-1]
        layout = BlockLayout(columns, shard_columns or columns)
        first, last = layout.block(here.start), layout.block(here.stop - 1)
        scales = shard.tensor
        assert isinstance(scales, Tensor), "scales are plain tensors"
        saved_scales = scales.new_empty((*scales.shape[:-1], last - first + 1))
        reshard = BlockReshard(
            codes=self._optimizer.state[parameter][moment],
            scales=scales,
            saved_scales=saved_scales,
            saved_layout=layout,
            columns=range(here.start, here.stop),
            signed=moment == MOMENTS[0],
        )
        self._reshards.append(reshard)
        shape, start = (*shard.shape[:-1], layout.num_blocks), (*shard.start[:-1], first)
        return TensorShard(key=saved_key, tensor=saved_scales, shape=shape, start=start)


def _position(parameter: Tensor, value: Tensor, state: str, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a full state and where in it this rank's is: sharded as its parameter, or not at all."""
    here = local_slices(parameter)
    size = tuple(each.stop - each.start for each in here)
    if value.shape == size:
        return tuple(parameter.shape), tuple(each.start for each in here)
    if value.ndim == 0 or not is_dtensor(parameter):
        return tuple(value.shape), (0,) * value.ndim
    raise UserError(
        "K031.optimizer-state-shape",
        where="optimizer",
        state=state,
        name=name,
        value_shape=list(value.shape),
        size=list(size),
        parameter_shape=list(parameter.shape),
    )


def _state_and_name(shard: TensorShard) -> tuple[str, str]:
    _, state, name = shard.key.split("/", 2)
    return state.partition("@")[0], name


def check_moment_format(shard: TensorShard, index: TensorIndex) -> None:
    """Raise when the checkpoint has the moments in another format than this run."""
    entry = index.get(shard.key)
    if entry is None or shard.key.split("/")[1] not in MOMENTS:
        return
    here, there = (FORMAT_BY_DTYPE.get(each, each) for each in (meta_of(shard).dtype, entry.meta.dtype))
    if here != there:
        raise UserError("K030.checkpoint-optimizer-moments", where="train.optimizer.states", there=there, here=here)
