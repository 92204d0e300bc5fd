"""Sends copies of rows to places, and adds them up again: how tokens reach their experts and come back.

On a GPU each direction is one kernel that reads and writes every row once. torch's backward of an index would sort the
indices again, or use atomic additions, whose order changes from run to run; its compiler adds up copies slowly.
"""

from typing import Any

import torch
from torch import Tensor

from trimaran.nets.operators import define_operator


def sorted_places(keys: Tensor) -> Tensor:
    """Return the place of each key in the sorted `keys` [N], which must fit 32 bits; equal keys keep their order."""
    order = keys.int().argsort(stable=True)
    numbers = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, numbers)


def scatter_rows(x: Tensor, places: Tensor) -> Tensor:
    """Return row n of `x` [N, width] at all of `places[n]`, [N x copies, width]; `places` [N, copies] has each once."""
    return _Scatter.apply(x, places)


def gather_rows(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return for each n the sum of `rows` at `places[n]`, times `weights[n]` if given: inverse of `scatter_rows`."""
    return _Gather.apply(rows, places, weights)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return torch.ops.trimaran.scatter_rows(x, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return torch.ops.trimaran.gather_rows(gradients[0], *ctx.saved_tensors, None), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(*((places,) if weights is None else (rows, places, weights)))
        return torch.ops.trimaran.gather_rows(rows, places, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, Tensor | None]:
        saved = ctx.saved_tensors
        if len(saved) == 1:
            return torch.ops.trimaran.scatter_rows(gradients[0], *saved), None, None
        grad_rows, grad_weights = torch.ops.trimaran.gather_rows_backward(gradients[0], *saved)
        return grad_rows, None, grad_weights


def _scatter_rows(x: Tensor, places: Tensor) -> Tensor:
    if x.is_cuda:
        from trimaran.nets.kernels import row_copies  # noqa: PLC0415 - only a GPU's torch has Triton

        return row_copies.scatter_rows(x, places)
    out = x.new_empty(places.numel(), x.shape[1])
    out[places.flatten()] = x.repeat_interleave(places.shape[1], dim=0)
    return out


def _gather_rows(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    if rows.is_cuda:
        from trimaran.nets.kernels import row_copies  # noqa: PLC0415

        return row_copies.gather_rows(rows, places, weights)
    copies = rows[places]
    return (copies if weights is None else copies * weights.unsqueeze(-1)).sum(1)


def _gather_rows_backward(gradient: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    if rows.is_cuda:
        from trimaran.nets.kernels import row_copies  # noqa: PLC0415

        return row_copies.gather_rows_backward(gradient, rows, places, weights)
    grad_rows, given = torch.empty_like(rows), gradient.unsqueeze(1)
    grad_rows[places.flatten()] = (given * weights.unsqueeze(-1)).flatten(0, 1)
    return grad_rows, (given * rows[places]).sum(-1)


# Each with the shape of its result, for torch's compiler.
define_operator(
    "scatter_rows(Tensor x, Tensor places) -> Tensor",
    _scatter_rows,
    lambda x, places: x.new_empty(places.shape[0] * places.shape[1], x.shape[1]),
)
define_operator(
    "gather_rows(Tensor rows, Tensor places, Tensor? weights) -> Tensor",
    _gather_rows,
    lambda rows, places, weights: rows.new_empty(places.shape[0], rows.shape[1]),
)
define_operator(
    "gather_rows_backward(Tensor gradient, Tensor rows, Tensor places, Tensor weights) -> (Tensor, Tensor)",
    _gather_rows_backward,
    lambda gradient, rows, places, weights: (torch.empty_like(rows), torch.empty_like(weights)),
)
