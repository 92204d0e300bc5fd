"""The collectives inside layers, between plain tensors, each with the collective of its backward.

Sequence parallelism splits the tokens of a micro-batch, not each of its sequences: the first rank has the first tokens
of `x.flatten(0, 1)`, in the shape [B, T / ranks, ...]. So gathers and reduce-scatters read and write contiguous memory;
parts of each sequence would have to be copied into this order and back. Between the collectives tokens are independent.

Those without an argument `axis` are for tensor parallelism. Each is one autograd function around torch's functional
operators, which compiled code and recompute by operator see.
DTensors would do the same for ten times the host time: every operator between two collectives is dispatched in Python.
Each times its wait (`AXIS_WAITS`), except in compiled code.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from trimaran.parallel.comm.axis_waits import AXIS_WAITS, axis_span

collective = torch.ops._c10d_functional  # private in torch
TP = "tp"


def gather_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the full sequences [B, T, ...] from each rank's tokens. The gradient is a partial sum on each rank."""
    return _Sequence.apply(x, mesh.size(), group_name(mesh), True)


def reduce_to_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's tokens of the sum over the ranks of `x` [B, T, ...], in the shape [B, T / ranks, ...]."""
    return _Sequence.apply(x, mesh.size(), group_name(mesh), False)


def reduce_sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of `x` over the ranks. Every rank has the full gradient of it."""
    return _Reduce.apply(x, group_name(mesh), TP, True)


def reduce_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return `x`, which is equal on all ranks. Its gradient is a partial sum on each rank, and is summed here."""
    return reduce_gradient_over(x, group_name(mesh), TP)


def reduce_gradient_over(x: Tensor, group: str, axis: str) -> Tensor:
    """The same as `reduce_gradient` for the ranks of a group, which belong to this axis."""
    return _Reduce.apply(x, group, axis, False)


def gather_columns(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the columns of all ranks, in order. What follows is equal on all ranks, and so is its gradient."""
    return _Columns.apply(x, mesh.size(), mesh.get_local_rank(), group_name(mesh), True)


def take_columns(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's columns of `x`, which is equal on all ranks; in backward the columns of all are gathered."""
    return _Columns.apply(x, mesh.size(), mesh.get_local_rank(), group_name(mesh), False)


def gather_dim(x: Tensor, dim: int, group: ProcessGroup, *, axis: str) -> Tensor:
    """Return the parts of all ranks, joined along `dim`. The gradient is a partial sum on each rank."""
    return _GatherDim.apply(x, dim, group.size(), group.group_name, axis)


def exchange_rows(
    x: Tensor, sends: Sequence[int], receives: Sequence[int], group: ProcessGroup, *, axis: str
) -> Tensor:
    """Return the rows that all ranks sent to this one, of which each sends so many to each other rank."""
    return await_rows(start_exchange(x, sends, receives, group, axis=axis), axis=axis)


def start_exchange(
    x: Tensor, sends: Sequence[int], receives: Sequence[int], group: ProcessGroup, *, axis: str
) -> Tensor:
    """Start `exchange_rows`. Only `await_rows` may read what it returns."""
    return _StartExchange.apply(x, [*sends], [*receives], group.group_name, axis)


def await_rows(pending: Tensor, *, axis: str) -> Tensor:
    """Return the result of `start_exchange`, in the order of the current stream."""
    return _Await.apply(pending, axis)


def start_all_to_all(x: Tensor, sends: Sequence[int], receives: Sequence[int], group: str) -> Tensor:
    """Start `exchange_rows`, without a gradient. Only `wait_for` may read what it returns."""
    return _start(collective.all_to_all_single, x, [*receives], [*sends], group)


def wait_for(pending: Tensor, *, axis: str) -> Tensor:
    """Return the result of `start_all_to_all`, in the order of the current stream."""
    with AXIS_WAITS.span(axis):
        return _wait(pending)


def group_name(mesh: DeviceMesh) -> str:
    """Return the name of a one-dimensional mesh's process group."""
    return mesh.get_group().group_name


class _Sequence(Function):
    """Gathers tokens in forward and reduce-scatters in backward, or the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str, gathers: bool) -> Tensor:
        ctx.size, ctx.group, ctx.gathers = size, group, gathers
        return (_gathered if gathers else _scattered)(x, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        return (_scattered if ctx.gathers else _gathered)(gradients[0], ctx.size, ctx.group), None, None, None


class _Reduce(Function):
    """All-reduces in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, axis: str, in_forward: bool) -> Tensor:
        ctx.group, ctx.axis, ctx.in_forward = group, axis, in_forward
        return _reduced(x, group, axis) if in_forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0] if ctx.in_forward else _reduced(gradients[0], ctx.group, ctx.axis)
        return gradient, None, None, None


class _GatherDim(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: str, axis: str) -> Tensor:
        ctx.dim, ctx.size, ctx.group, ctx.axis = dim, size, group, axis
        parts = _run(axis, collective.all_gather_into_tensor, x.contiguous(), size, group)
        return torch.cat(parts.split(x.shape[0]), dim=dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:
        parts = torch.cat(gradients[0].chunk(ctx.size, ctx.dim))
        local = _run(ctx.axis, collective.reduce_scatter_tensor, parts, "sum", ctx.size, ctx.group)
        return local, None, None, None, None


class _Columns(Function):
    """Gathers columns in forward and takes this rank's in backward, or the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, rank: int, group: str, gathers: bool) -> Tensor:
        ctx.size, ctx.rank, ctx.group, ctx.gathers = size, rank, group, gathers
        return _all_columns(x, size, group) if gathers else x.chunk(size, -1)[rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:
        if ctx.gathers:
            gradient = gradients[0].chunk(ctx.size, -1)[ctx.rank].contiguous()
        else:
            gradient = _all_columns(gradients[0], ctx.size, ctx.group)
        return gradient, None, None, None, None


class _StartExchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: list[int], receives: list[int], group: str, axis: str) -> Tensor:
        ctx.sends, ctx.receives, ctx.group, ctx.axis = sends, receives, group, axis
        return _start(collective.all_to_all_single, x.contiguous(), receives, sends, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:
        given = gradients[0].contiguous()
        rows = _run(ctx.axis, collective.all_to_all_single, given, ctx.sends, ctx.receives, ctx.group)
        return rows, None, None, None, None


class _Await(Function):
    @staticmethod
    def forward(ctx: Any, pending: Tensor, axis: str) -> Tensor:
        done = _wait(pending) if torch.compiler.is_compiling() else wait_for(pending, axis=axis)
        return done.view_as(done)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


def _gathered(x: Tensor, size: int, group: str) -> Tensor:
    """Return the tokens of all ranks, [B, T, ...], from this rank's, [B, T / size, ...]."""
    parts = _run(TP, collective.all_gather_into_tensor, x.contiguous(), size, group)
    return parts.view(x.shape[0], -1, *x.shape[2:])


def _all_columns(x: Tensor, size: int, group: str) -> Tensor:
    """Return the columns of all ranks, of which each has equally many."""
    parts = _run(TP, collective.all_gather_into_tensor, x.contiguous(), size, group)
    return torch.cat(parts.split(x.shape[0]), dim=-1)


def _scattered(x: Tensor, size: int, group: str) -> Tensor:
    """Return this rank's tokens, [B, T / size, ...], of the sum of `x` [B, T, ...] over all ranks."""
    assert x.shape[1] % size == 0, "each rank has equally many tokens"
    parts = x.contiguous().view(size * x.shape[0], -1, *x.shape[2:])
    return _run(TP, collective.reduce_scatter_tensor, parts, "sum", size, group)


def _reduced(x: Tensor, group: str, axis: str) -> Tensor:
    return _run(axis, collective.all_reduce, x.contiguous(), "sum", group)


def _run(axis: str, operator: Any, *args: Any) -> Tensor:
    """Return the result of a collective, in the order of the current stream."""
    with axis_span(axis):
        return _wait(_start(operator, *args))


def _start(operator: Any, *args: Any) -> Tensor:
    """Start a collective without autograd, which the functions above replace: it would take as long as the call."""
    if torch.compiler.is_compiling():
        return operator(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def _wait(pending: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return collective.wait_tensor(pending)
    with torch._C._AutoDispatchBelowAutograd():
        return collective.wait_tensor(pending)
