"""The collectives of tensor parallelism between plain tensors, each with the collective of its backward.

Each is one autograd function around torch's functional operators, which compiled code and recompute by operator see.
DTensors would do the same for ten times the host time: every operator between two collectives is dispatched in Python.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

collective = torch.ops._c10d_functional  # private in torch


def gather_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the full sequences [B, T, ...] from each rank's positions. The gradient is a partial sum on each rank."""
    return _GatherSequence.apply(x, mesh.size(), group_name(mesh))


def reduce_to_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's positions of the sum over the ranks of `x` [B, T, ...]."""
    return _ReduceToSequence.apply(x, mesh.size(), group_name(mesh))


def reduce_sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of `x` over the ranks. Every rank has the full gradient of it."""
    return _ReduceSum.apply(x, group_name(mesh))


def reduce_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return `x`, which is equal on all ranks. Its gradient is a partial sum on each rank, and is summed here."""
    return _ReduceGradient.apply(x, group_name(mesh))


def group_name(mesh: DeviceMesh) -> str:
    """Return the name of a one-dimensional mesh's process group."""
    return mesh.get_group().group_name


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return _gathered(x, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return _scattered(gradients[0], ctx.size, ctx.group), None, None


class _ReduceToSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return _scattered(x, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return _gathered(gradients[0], ctx.size, ctx.group), None, None


class _ReduceSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return _reduced(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


class _ReduceGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return _reduced(gradients[0], ctx.group), None


def _gathered(x: Tensor, size: int, group: str) -> Tensor:
    """Return the parts [B, T / size, ...] of all ranks, joined along dim 1. A single row needs no copy."""
    parts = _run(collective.all_gather_into_tensor, x.contiguous(), size, group)
    if x.shape[0] == 1:
        return parts.view(1, -1, *x.shape[2:])
    return torch.cat(parts.split(x.shape[0]), dim=1)


def _scattered(x: Tensor, size: int, group: str) -> Tensor:
    """Return this rank's part, along dim 1, of the sum of `x` [B, T, ...] over all ranks."""
    assert x.shape[1] % size == 0, "each rank has equally many positions"
    if x.shape[0] == 1:
        parts = x.contiguous().view(size, -1, *x.shape[2:])
    else:
        parts = torch.cat(x.split(x.shape[1] // size, dim=1))
    return _run(collective.reduce_scatter_tensor, parts, "sum", size, group)


def _reduced(x: Tensor, group: str) -> Tensor:
    return _run(collective.all_reduce, x.contiguous(), "sum", group)


def _run(operator: Any, *args: Any) -> Tensor:
    """Return the result of a collective, in the order of the current stream.

    Autograd is skipped, which the functions above do: it would take as long as the rest of the call.
    """
    if torch.compiler.is_compiling():
        return collective.wait_tensor(operator(*args))
    with torch._C._AutoDispatchBelowAutograd():
        return collective.wait_tensor(operator(*args))
