"""The norm of all gradients, however they are split."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradient_norm(parameters: Sequence[nn.Parameter], *, pp: int = 1) -> Tensor:
    """Return the norm over all gradients of the model, bit for bit the same on every rank."""
    return gradient_squares([parameters], pp=pp, device=parameters[0].device).sum().sqrt()


def gradient_squares(groups: Sequence[Sequence[nn.Parameter]], *, pp: int, device: torch.device) -> Tensor:
    """Return the squared norm over all gradients of each group, bit for bit the same on every rank: one small sum.

    Every rank adds the squares of what it holds, divided by how many ranks with the same stages of `pp` hold it too:
    one sum over all ranks is right for any mixture of meshes. (DTensor would sum axis by axis, in an order of each
    rank's own.) A rank without any gradient of a group takes part with zero. `device` is where the gradients are.
    """
    squares = torch.stack([_squares_here(group, pp, device) for group in groups])
    dist.all_reduce(squares)
    return squares


def _squares_here(parameters: Sequence[nn.Parameter], pp: int, device: torch.device) -> Tensor:
    """Return this rank's share of the squared norm."""
    num_ranks = dist.get_world_size() // pp
    by_copies: dict[int, list[Tensor]] = {}
    for each in parameters:
        if gradient_of(each) is not None:
            gradient, shards = local_gradient(each)
            by_copies.setdefault(num_ranks // shards, []).append(gradient)
    squares = [_total_norm(held).square() / copies for copies, held in by_copies.items()]
    return torch.stack(squares).sum() if squares else torch.zeros((), device=device)


def _total_norm(held: Sequence[Tensor]) -> Tensor:
    """Return the norm over all tensors, in fp32 at least: torch's own gives that of bf16 tensors in bf16."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in held:
        by_kind.setdefault((each.device, each.dtype), []).append(each)
    norms: list[Tensor] = []
    for (_, dtype), alike in by_kind.items():
        norms += torch._foreach_norm(alike, 2.0, dtype=torch.promote_types(dtype, torch.float32))
    return torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient that moves a parameter: `main_grad`, where its micro-batches are summed apart, or `grad`."""
    summed = getattr(parameter, "main_grad", None)
    return parameter.grad if summed is None else summed


def local_gradient(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """Return the part of a parameter's gradient that is here, and how many parts there are.

    Where each rank knows an addend (a norm that saw some of the positions), the addends are summed first.
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
