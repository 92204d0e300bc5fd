"""The formats of AdamW's two moments, the update in each format, and stochastic rounding to bf16."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trimaran.nets import local_slices
from trimaran.parallel.optimizer.optimizer_state import codebook, dequantize, num_blocks, quantize
from trimaran.parallel.tensor_shards import join_fp32, split_fp32

IndexRuns = tuple[Tensor, int]
"""Element indices as runs of consecutive numbers: the int32 index that each run starts with, and their length."""


def to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 `values` as bf16: the nearer one is more likely. The lower 16 bits of the int32 `noise` decide."""
    bits = values.view(torch.int32)
    rounded = ((bits + (noise & 0xFFFF)) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def hash_text(key: str) -> int:
    """Return a 32-bit hash of `key`, as a signed number."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little", signed=True)


def index_runs(parameter: Tensor, rows: slice) -> IndexRuns:
    """Return the element indices of some rows of this rank's shard, counted in the full parameter.

    The shard is taken as 2-D, with the last dimension as its columns. An element has the same index on every rank that
    holds it. There is one run if at most the first dimension is sharded, otherwise one per row.
    """
    here, device = local_slices(parameter), parameter.device
    width = here[-1].stop - here[-1].start if here else 1
    if all(each == slice(0, size) for each, size in zip(here[1:], parameter.shape[1:], strict=True)):
        above = here[0].start * parameter.shape[1:].numel() if here else 0
        first = (above + rows.start * width + 2**31) % 2**32 - 2**31
        return torch.full((1,), first, device=device, dtype=torch.int32), (rows.stop - rows.start) * width
    starts = torch.zeros(1, device=device, dtype=torch.int64)
    for each, size in zip(here[:-1], parameter.shape, strict=False):
        starts = (starts[:, None] * size + torch.arange(each.start, each.stop, device=device)).flatten()
    # The cast, and all arithmetic after it, wraps around at 2^32.
    return (starts[rows] * parameter.shape[-1] + here[-1].start).int(), width


def hash_int32(number: Tensor) -> Tensor:
    """Return 32 pseudo-random bits, as int32, that depend only on the int32 `number`.

    This is Wellons' lowbias32. Unlike the numbers of a torch generator, these bits depend neither on the device nor on
    how many of them a rank draws: replicas round the same, and so do different plans.
    """
    number = (number ^ ((number >> 16) & 0xFFFF)) * 0x7FEB352D
    number = (number ^ ((number >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return number ^ ((number >> 16) & 0xFFFF)


States = dict[str, Tensor]
Shape = tuple[int, ...]
NOISE_OFFSET = 3  # the last column of `step_constants`


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConstants:
    """The hyperparameters of a parameter group."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChunk:
    """Some rows of this rank's shard of one parameter, as a 2-D tensor with the last dimension as its columns.

    `weight` is fp32, or the bf16 upper half if there is a lower half, `low`. `gradient` has yet to be multiplied by
    `factor`. `step` is the parameter's step count including this step, on the device; `step_constants` is computed from
    it. `index_runs` are the indices of the elements, where moments are rounded stochastically.
    """

    weight: Tensor
    low: Tensor | None
    gradient: Tensor
    states: States
    factor: Tensor | None
    step: Tensor
    step_constants: Tensor
    constants: AdamWConstants
    parameter: Tensor
    index_runs: IndexRuns | None


class Fp32Moments:
    """Both moments in fp32, updated by torch's fused kernel: 8 bytes a value."""

    def layout(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return the shape and dtype of each state of a shard with this shape. All of them start as zeros."""
        return {"exp_avg": (shape, torch.float32), "exp_avg_sq": (shape, torch.float32)}

    def update(self, weight: Tensor, gradient: Tensor, states: States, chunk: StateChunk) -> None:
        """Update fp32 weights and states in place. States have as many rows as the weights they belong to."""
        constants = chunk.constants
        moments = [states["exp_avg"]], [states["exp_avg_sq"]]
        adamw(
            [weight],
            [gradient],
            *moments,
            [],
            [chunk.step - 1],  # torch adds one
            fused=True,
            amsgrad=False,
            beta1=constants.betas[0],
            beta2=constants.betas[1],
            lr=constants.lr,
            weight_decay=constants.weight_decay,
            eps=constants.eps,
            maximize=False,
        )


class Bf16Moments:
    """Both moments in bf16, 4 bytes a value, rounded stochastically: to nearest, a second one could stop shrinking."""

    def layout(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        return {"exp_avg": (shape, torch.bfloat16), "exp_avg_sq": (shape, torch.bfloat16)}

    def update(self, weight: Tensor, gradient: Tensor, states: States, chunk: StateChunk) -> None:
        before = (states["exp_avg"].float(), states["exp_avg_sq"].float())
        first, second = _update_moments(gradient, *before, chunk.constants.betas)
        _update_weight(weight, first, second, chunk)
        assert chunk.index_runs is not None
        starts, length = chunk.index_runs
        offsets = torch.arange(length, device=starts.device, dtype=torch.int32)
        noise = hash_int32((starts + chunk.step_constants[NOISE_OFFSET])[:, None] + offsets).view(weight.shape)
        states["exp_avg"].copy_(to_bf16(first, noise))
        states["exp_avg_sq"].copy_(to_bf16(second, noise >> 16))


class EightBitMoments:
    """Both moments in 8 bits a value with a scale per block: 2.03 bytes a value."""

    def layout(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        scales = (*shape[:-1], num_blocks(shape[-1]))
        return {
            "exp_avg": (shape, torch.uint8),
            "exp_avg_scale": (scales, torch.float32),
            "exp_avg_sq": (shape, torch.uint8),
            "exp_avg_sq_scale": (scales, torch.float32),
        }

    def update(self, weight: Tensor, gradient: Tensor, states: States, chunk: StateChunk) -> None:
        signed, unsigned = (codebook(weight.device, signed=signed) for signed in (True, False))
        first, second = _update_moments(
            gradient,
            dequantize(states["exp_avg"], states["exp_avg_scale"], signed),
            dequantize(states["exp_avg_sq"], states["exp_avg_sq_scale"], unsigned),
            chunk.constants.betas,
        )
        _update_weight(weight, first, second, chunk)
        codes, scales = quantize(first, signed)
        states["exp_avg"].copy_(codes)
        states["exp_avg_scale"].copy_(scales)
        # A second moment never becomes zero: with a zero gradient next, the first would be divided by epsilon alone.
        codes, scales = quantize(second, unsigned, lowest=1)
        states["exp_avg_sq"].copy_(codes)
        states["exp_avg_sq_scale"].copy_(scales)


MomentFormat = Fp32Moments | Bf16Moments | EightBitMoments
FORMATS: Mapping[str, MomentFormat] = {"fp32": Fp32Moments(), "bf16": Bf16Moments(), "8bit": EightBitMoments()}


def update_chunk(chunk: StateChunk, states: States, moments: MomentFormat) -> None:
    """Update weights and states in place. `states` are the chunk's, on the device of its weights."""
    weight = chunk.weight if chunk.low is None else join_fp32(chunk.weight, chunk.low)
    gradient = chunk.gradient.to(weight.dtype)
    moments.update(weight, gradient if chunk.factor is None else gradient * chunk.factor, states, chunk)
    if chunk.low is not None:
        upper, lower = split_fp32(weight)
        chunk.weight.copy_(upper)
        chunk.low.copy_(lower)


def step_constants(steps: Tensor, name_hashes: Tensor, constants: AdamWConstants) -> Tensor:
    """Return four 32-bit numbers for each parameter, as int32 [N, 4]. `steps` count from 1.

    The first three are the bits of fp32 numbers: the factor of weight decay, the learning rate over the first moment's
    bias correction, and the square root of the second's. They are computed in fp64, as 1 - beta^step loses too much in
    fp32. The last one is added to the element indices (see `index_runs`), for other noise at every step.
    """
    first, second = (1 - beta ** steps.double() for beta in constants.betas)
    decay = torch.full_like(first, 1 - constants.lr * constants.weight_decay)
    numbers = torch.stack([decay, constants.lr / first, second.sqrt()], dim=1).float()
    return torch.cat([numbers.view(torch.int32), hash_int32(name_hashes + steps.int())[:, None]], dim=1)


def _update_moments(
    gradient: Tensor, first: Tensor, second: Tensor, betas: tuple[float, float]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return first.lerp(gradient, 1 - betas[0]), second * betas[1] + gradient.square() * (1 - betas[1])


def _update_weight(weight: Tensor, first: Tensor, second: Tensor, chunk: StateChunk) -> None:
    """Update the weights with moments that have not been rounded yet."""
    decay, size, correction = chunk.step_constants[:NOISE_OFFSET].view(torch.float32)
    weight.copy_(weight * decay - first / (second.sqrt() / correction + chunk.constants.eps) * size)
