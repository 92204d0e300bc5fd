"""The global gradient norm for any combination of sharding."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradient_norm(parameters: Sequence[nn.Parameter], *, pp: int = 1) -> Tensor:
    """Return the norm over all gradients of the model, bitwise equal on every rank."""
    return squared_gradient_norms([parameters], pp=pp, device=parameters[0].device).sum().sqrt()


def squared_gradient_norms(groups: Sequence[Sequence[nn.Parameter]], *, pp: int, device: torch.device) -> Tensor:
    """Return the squared gradient norm of each group, bitwise equal on every rank, with one small all-reduce.

    Every rank contributes the squares of its local gradients, divided by the number of ranks of its pipeline stage that
    hold the same shard. So one all-reduce over all ranks is correct for any combination of meshes. (DTensor would
    reduce one mesh dim after the other, in an order that differs between ranks.) A rank without gradients of a group
    contributes zero. `device` is the device of the gradients.
    """
    squares = torch.stack([_squares_here(group, pp, device) for group in groups])
    dist.all_reduce(squares)
    return squares


def _squares_here(parameters: Sequence[nn.Parameter], pp: int, device: torch.device) -> Tensor:
    """Return this rank's contribution to the squared norm."""
    num_ranks = dist.get_world_size() // pp
    by_copies: dict[int, list[Tensor]] = {}
    for each in parameters:
        if gradient_of(each) is not None:
            gradient, shards = local_gradient(each)
            by_copies.setdefault(num_ranks // shards, []).append(gradient)
    squares = [_total_norm(gradients).square() / copies for copies, gradients in by_copies.items()]
    return torch.stack(squares).sum() if squares else torch.zeros((), device=device)


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm over all tensors in at least fp32; torch computes the norm of bf16 tensors in bf16."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in gradients:
        by_kind.setdefault((each.device, each.dtype), []).append(each)
    norms: list[Tensor] = []
    for (_, dtype), same_kind in by_kind.items():
        norms += torch._foreach_norm(same_kind, 2.0, dtype=torch.promote_types(dtype, torch.float32))
    return torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient of the update: `main_grad` if micro-batches are accumulated separately, else `grad`."""
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def local_gradient(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """Return the local shard of a parameter's gradient, and the number of shards.

    A partial gradient (of a norm that saw some of the positions) is reduced first.
    """
    gradient = gradient_of(parameter)
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient, 1
    assert isinstance(parameter, DTensor)
    if gradient.placements != parameter.placements:
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return gradient.to_local(), torch.Size(size for placement, size in sizes if not placement.is_replicate()).numel()
