"""The norm of parameters as a part of a loss, for weights that are replicated or sharded."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimaran.parallel.axes.fsdp import parameter_groups


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
