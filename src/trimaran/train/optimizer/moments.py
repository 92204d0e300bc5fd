"""How AdamW's two moments are kept, and how a step moves weights and moments."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trimaran.train.optimizer.blocks import codebook, num_blocks, quantised, restored
from trimaran.train.optimizer.rounding import numbers, scrambled, to_bf16

States = dict[str, Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What a step's arithmetic depends on besides tensors. `step` counts from 1."""

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows of one parameter's part on this rank, as a table whose rows are the last dimension."""

    weight: Tensor
    gradient: Tensor
    states: States
    constants: Constants
    parameter: Tensor
    rows: slice
    key: str


class Moments(Protocol):
    """One way to keep the moments. States have as many rows as the weights they belong to."""

    def layout(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return the shape and type of each state of a part with this shape. All of them begin as zeros."""
        ...

    def move(self, piece: Piece, states: States) -> None:
        """Update weights and states in place. `states` are the piece's, on the device of its weights."""
        ...


class Exact:
    """Both moments in fp32, moved by torch's fused kernel: 8 bytes a value."""

    def layout(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        return {"exp_avg": (shape, torch.float32), "exp_avg_sq": (shape, torch.float32)}

    def move(self, piece: Piece, states: States) -> None:
        constants = piece.constants
        adamw(
            [piece.weight],
            [piece.gradient],
            [states["exp_avg"]],
            [states["exp_avg_sq"]],
            [],
            [torch.full((), constants.step - 1.0, device=piece.weight.device)],  # the kernel's caller adds one
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

    def __init__(self, *, compiled: bool) -> None:
        self._move = _chosen(_move_rounded, compiled)

    def layout(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        return {"exp_avg": (shape, torch.bfloat16), "exp_avg_sq": (shape, torch.bfloat16)}

    def move(self, piece: Piece, states: States) -> None:
        where = numbers(piece.parameter, piece.rows, key=piece.key)
        self._move(*_bare(piece, states), where, _scalars(piece.constants))


class Quantised:
    """Both moments in eight bits a value and a scale a block: 2.03 bytes a value."""

    def __init__(self, *, compiled: bool) -> None:
        self._move = _chosen(_move_quantised, compiled)

    def layout(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        scales = (*shape[:-1], num_blocks(shape[-1]))
        return {
            "exp_avg": (shape, torch.uint8),
            "exp_avg_scale": (scales, torch.float32),
            "exp_avg_sq": (shape, torch.uint8),
            "exp_avg_sq_scale": (scales, torch.float32),
        }

    def move(self, piece: Piece, states: States) -> None:
        books = [codebook(piece.weight.device, signed=signed) for signed in (True, False)]
        self._move(*_bare(piece, states), books, _scalars(piece.constants))


def _chosen(function: Callable[..., None], compiled: bool) -> Callable[..., None]:
    return torch.compile(function, dynamic=True) if compiled else function


def _bare(piece: Piece, states: States) -> tuple[Tensor, Tensor, States]:
    """Return weights, gradient and states over the same memory, but views of nothing.

    Of a view, compiled code asks which tensor it belongs to, and is compiled again for each kind of answer.
    """
    return piece.weight.data, piece.gradient.data, {key: value.data for key, value in states.items()}


class Scalars(NamedTuple):
    """A step's constants for our own arithmetic.

    What changes from step to step is a scalar tensor, for compiled code keeps plain numbers for good.
    """

    betas: tuple[float, float]
    eps: float
    keep: Tensor  # the share of a weight that decay leaves
    size: Tensor  # the learning rate over the first moment's bias correction
    root: Tensor  # of the second moment's bias correction


def _scalars(constants: Constants) -> Scalars:
    first, second = (1 - beta**constants.step for beta in constants.betas)
    changing = (1 - constants.lr * constants.weight_decay, constants.lr / first, math.sqrt(second))
    return Scalars(constants.betas, constants.eps, *(torch.tensor(each, dtype=torch.float32) for each in changing))


def _move_rounded(
    weight: Tensor, gradient: Tensor, states: States, where: tuple[Tensor, Tensor], scalars: Scalars
) -> None:
    first, second = _moments(gradient, states["exp_avg"].float(), states["exp_avg_sq"].float(), scalars.betas)
    _move_weight(weight, first, second, scalars)
    noise = scrambled(where[0][:, None] + where[1])
    states["exp_avg"].copy_(to_bf16(first, noise))
    states["exp_avg_sq"].copy_(to_bf16(second, noise >> 16))


def _move_quantised(weight: Tensor, gradient: Tensor, states: States, books: list[Tensor], scalars: Scalars) -> None:
    signed, unsigned = books
    first, second = _moments(
        gradient,
        restored(states["exp_avg"], states["exp_avg_scale"], signed),
        restored(states["exp_avg_sq"], states["exp_avg_sq_scale"], unsigned),
        scalars.betas,
    )
    _move_weight(weight, first, second, scalars)
    codes, scales = quantised(first, signed)
    states["exp_avg"].copy_(codes)
    states["exp_avg_scale"].copy_(scales)
    # A second moment is never called zero: where the next gradient is, the first would be divided by epsilon alone.
    codes, scales = quantised(second, unsigned, lowest=1)
    states["exp_avg_sq"].copy_(codes)
    states["exp_avg_sq_scale"].copy_(scales)


def _moments(gradient: Tensor, first: Tensor, second: Tensor, betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    return first.lerp(gradient, 1 - betas[0]), second * betas[1] + gradient.square() * (1 - betas[1])


def _move_weight(weight: Tensor, first: Tensor, second: Tensor, scalars: Scalars) -> None:
    """Move the weights by moments that have not been rounded yet."""
    weight.copy_(weight * scalars.keep - first / (second.sqrt() / scalars.root + scalars.eps) * scalars.size)
