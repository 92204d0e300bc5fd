"""Functions that a loss may call: `loop.gather` returns the rows of all ranks; the norm of sharded parameters."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from trimaran.core import UserError
from trimaran.parallel import all_gather_json, parameter_groups

WHERE = "loop.gather(x)"


def gather_rows(rows: Tensor, *, is_padding: bool, dim: int) -> Tensor:
    """Return the rows of all ranks along `dim`, in rank order. Every rank must call it.

    Ranks may have different numbers of rows; those of a rank with `is_padding` are left out. The gradient that a rank's
    rows get is the sum of the gradients of all ranks.
    """
    shape = list(rows.shape)
    if not -rows.ndim <= dim < rows.ndim:
        raise UserError("P146.tensor-shape", where=WHERE, shape=shape, dim=dim)
    if dist.get_world_size() == 1:
        return rows
    first = rows.movedim(dim, 0)
    described = [str(first.dtype), list(first.shape[1:]), 0 if is_padding else len(first)]
    ranks = all_gather_json(described)
    if any(each[:2] != ranks[0][:2] for each in ranks):
        shapes = "; ".join(f"rank {rank} has rows of {kind} {size}" for rank, (kind, size, _) in enumerate(ranks))
        raise UserError("P146.rows-ranks-differ", where=WHERE, shapes=shapes)
    whole = _AllGather.apply(first, [count for *_, count in ranks])
    return whole.movedim(0, dim)


class _AllGather(torch.autograd.Function):
    """All-gather along dim 0 in forward; sum the gradients over the ranks in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int]) -> Tensor:
        ctx.start, ctx.count, ctx.num_rows = sum(counts[: dist.get_rank()]), counts[dist.get_rank()], len(rows)
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: ctx.count] = rows[: ctx.count]
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyrefly: ignore[bad-override]
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        mine = total.new_zeros(ctx.num_rows, *total.shape[1:])
        mine[: ctx.count] = total[ctx.start : ctx.start + ctx.count]
        return mine, None


def parameter_norm(model: nn.Module, parameters: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm over all values of parameters of `model`, with gradients. Every rank must call it."""
    # Gathered weights may be freed before backward gets here; their shards are not.
    shards = {
        id(each._unsharded_param): each.sharded_param
        for group in parameter_groups(model)
        for each in group.fsdp_params
        if hasattr(each, "_unsharded_param")
    }
    given = [shards.get(id(each), each) for each in parameters]
    is_sharded = [isinstance(each, DTensor) for each in given]
    return _NormOfShards.apply(is_sharded, *(each.to_local() if isinstance(each, DTensor) else each for each in given))


class _NormOfShards(torch.autograd.Function):
    """The gradient of a shard is not reduced over ranks, so backward averages the gradient of the norm in its place."""

    @staticmethod
    def forward(ctx: Any, is_sharded: list[bool], *parts: Tensor) -> Tensor:
        squares = torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32)).square()
        ctx.needs_ranks = any(is_sharded) and dist.get_world_size() > 1
        if ctx.needs_ranks:
            mask = torch.tensor(is_sharded, device=squares.device)
            sums = torch.where(mask, squares, 0.0).sum()
            dist.all_reduce(sums)
            norm = (sums + torch.where(mask, 0.0, squares).sum()).sqrt()
        else:
            norm = squares.sum().sqrt()
        ctx.save_for_backward(norm, *parts)
        return norm

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        norm, *parts = ctx.saved_tensors
        gradient = gradients[0] / dist.get_world_size() if ctx.needs_ranks else gradients[0]
        if ctx.needs_ranks:
            dist.all_reduce(gradient)
        factor = torch.where(norm == 0, 0.0, gradient / norm)
        return None, *(each * factor.to(each.dtype) for each in parts)
