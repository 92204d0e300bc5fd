"""How AdamW's two moments are kept, and how a step moves weights and moments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trimaran.optim.block_quantization import codebook, num_blocks, quantised, restored
from trimaran.optim.split_bf16 import join, split
from trimaran.optim.stochastic_rounding import Runs, scrambled, to_bf16

States = dict[str, Tensor]
Shape = tuple[int, ...]
KEEP, SIZE, ROOT, SALT = range(4)  # the words that a step has for each parameter, see `words`


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the arithmetic of a group of parameters depends on besides tensors."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChunk:
    """Rows of one parameter's part on this rank, as a table whose rows are the last dimension.

    `weight` is fp32, or its upper half where there is a lower one, `low`. `gradient` is still to be multiplied by
    `factor`. `step` is what the parameter's steps count up to with this one, on the device, and `words` what follows
    from it. `runs` number the values where moments are rounded by chance.
    """

    weight: Tensor
    low: Tensor | None
    gradient: Tensor
    states: States
    factor: Tensor | None
    step: Tensor
    words: Tensor
    constants: Constants
    parameter: Tensor
    runs: Runs | None


class Moments(Protocol):
    """One way to keep the moments. States have as many rows as the weights they belong to."""

    def layout(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return the shape and type of each state of a part with this shape. All of them begin as zeros."""
        ...

    def move(self, weight: Tensor, gradient: Tensor, states: States, piece: StateChunk) -> None:
        """Update weights, fp32 and whole, and states in place."""
        ...


class Exact:
    """Both moments in fp32, moved by torch's fused kernel: 8 bytes a value."""

    def layout(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        return {"exp_avg": (shape, torch.float32), "exp_avg_sq": (shape, torch.float32)}

    def move(self, weight: Tensor, gradient: Tensor, states: States, piece: StateChunk) -> None:
        constants = piece.constants
        adamw(
            [weight],
            [gradient],
            [states["exp_avg"]],
            [states["exp_avg_sq"]],
            [],
            [piece.step - 1],  # the kernel's caller adds one
            fused=True,
            amsgrad=False,
            beta1=constants.betas[0],
            beta2=constants.betas[1],
            lr=constants.lr,
            weight_decay=constants.weight_decay,
            eps=constants.eps,
            maximize=False,
        )


class Rounded:
    """Both moments in bf16, rounded stochastically: 4 bytes a value.

    Rounded to the nearest, a second moment that should shrink by less than half a bf16 step would stay for ever.
    """

    def layout(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        return {"exp_avg": (shape, torch.bfloat16), "exp_avg_sq": (shape, torch.bfloat16)}

    def move(self, weight: Tensor, gradient: Tensor, states: States, piece: StateChunk) -> None:
        before = (states["exp_avg"].float(), states["exp_avg_sq"].float())
        first, second = _moments(gradient, *before, piece.constants.betas)
        _move_weight(weight, first, second, piece)
        assert piece.runs is not None
        starts, length = piece.runs
        places = torch.arange(length, device=starts.device, dtype=torch.int32)
        noise = scrambled((starts + piece.words[SALT])[:, None] + places).view(weight.shape)
        states["exp_avg"].copy_(to_bf16(first, noise))
        states["exp_avg_sq"].copy_(to_bf16(second, noise >> 16))


class Quantised:
    """Both moments in eight bits a value and a scale a block: 2.03 bytes a value."""

    def layout(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        scales = (*shape[:-1], num_blocks(shape[-1]))
        return {
            "exp_avg": (shape, torch.uint8),
            "exp_avg_scale": (scales, torch.float32),
            "exp_avg_sq": (shape, torch.uint8),
            "exp_avg_sq_scale": (scales, torch.float32),
        }

    def move(self, weight: Tensor, gradient: Tensor, states: States, piece: StateChunk) -> None:
        signed, unsigned = (codebook(weight.device, signed=signed) for signed in (True, False))
        first, second = _moments(
            gradient,
            restored(states["exp_avg"], states["exp_avg_scale"], signed),
            restored(states["exp_avg_sq"], states["exp_avg_sq_scale"], unsigned),
            piece.constants.betas,
        )
        _move_weight(weight, first, second, piece)
        codes, scales = quantised(first, signed)
        states["exp_avg"].copy_(codes)
        states["exp_avg_scale"].copy_(scales)
        # A second moment is never called zero: where the next gradient is, the first would be divided by epsilon alone.
        codes, scales = quantised(second, unsigned, lowest=1)
        states["exp_avg_sq"].copy_(codes)
        states["exp_avg_sq_scale"].copy_(scales)


FORMATS: Mapping[str, Moments] = {"fp32": Exact(), "bf16": Rounded(), "8bit": Quantised()}


def move(piece: StateChunk, states: States, moments: Moments) -> None:
    """Update weights and states in place. `states` are the piece's, on the device of its weights."""
    weight = piece.weight if piece.low is None else join(piece.weight, piece.low)
    gradient = piece.gradient.to(weight.dtype)
    moments.move(weight, gradient if piece.factor is None else gradient * piece.factor, states, piece)
    if piece.low is not None:
        upper, lower = split(weight)
        piece.weight.copy_(upper)
        piece.low.copy_(lower)


def words(steps: Tensor, salts: Tensor, constants: Constants) -> Tensor:
    """Return four words of 32 bits, int32 [N, 4], for parameters that take these steps, which count from 1.

    The first three are fp32: the share of a weight that decay leaves, the learning rate over the first moment's bias
    correction, and the root of the second's. They come from fp64, as 1 - beta^step does not survive fp32. The last
    word is what the numbers of the values (see `rounding.runs`) are moved by at this step.
    """
    first, second = (1 - beta ** steps.double() for beta in constants.betas)
    keep = torch.full_like(first, 1 - constants.lr * constants.weight_decay)
    numbers = torch.stack([keep, constants.lr / first, second.sqrt()], dim=1).float()
    return torch.cat([numbers.view(torch.int32), scrambled(salts + steps.int())[:, None]], dim=1)


def _moments(gradient: Tensor, first: Tensor, second: Tensor, betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    return first.lerp(gradient, 1 - betas[0]), second * betas[1] + gradient.square() * (1 - betas[1])


def _move_weight(weight: Tensor, first: Tensor, second: Tensor, piece: StateChunk) -> None:
    """Move the weights by moments that have not been rounded yet."""
    keep, size, root = piece.words[:SALT].view(torch.float32)
    weight.copy_(weight * keep - first / (second.sqrt() / root + piece.constants.eps) * size)
