"""The global gradient norm for any combination of sharding."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.nets.local_shards import is_dtensor, local_part
from trimaran.parallel.comm.axis_waits import AXIS_WAITS, axis_span
from trimaran.parallel.tensor_sums import TensorSquares, to_device


def gradient_norm(parameters: Sequence[nn.Parameter], *, pp: int = 1) -> Tensor:
    """Return the norm over all gradients of the model, bitwise equal on every rank."""
    gradients = GradientSquares([parameters], pp=pp, device=parameters[0].device)
    gradients.measure()
    squares = gradients.group_squares()
    if dist.get_world_size() > 1:
        dist.all_reduce(squares)
    return squares.sum().sqrt().float()


def sum_partial_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """All-reduce gradients over the tensor-parallel ranks of `group`, in place: each has those of its own images."""
    gradients = [local_part(each.grad) for each in parameters if each.grad is not None]
    gradients = [each for each in gradients if each.numel()]  # a rank's shard of a small parameter may be empty
    if not gradients:
        return
    flat = torch.cat([each.flatten() for each in gradients])
    with axis_span("tp"):
        dist.all_reduce(flat, group=group)
    parts = flat.split([each.numel() for each in gradients])
    torch._foreach_copy_(gradients, [part.view_as(each) for part, each in zip(parts, gradients, strict=True)])


class GradientSquares:
    """The squared gradient norms of groups of parameters, in fp64. No parameter is in two groups.

    `measure` makes one pass over the gradients. Every rank contributes the squares of its local gradients, divided by
    the number of ranks of its pipeline stage that hold the same shard. So one all-reduce over all ranks is correct for
    any combination of meshes. (DTensor would reduce one mesh dim after the other, in an order that differs between
    ranks.) A rank without gradients of a group contributes zero. `device` is the device of the gradients.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]], *, pp: int, device: torch.device) -> None:
        self.parameters = [each for group in groups for each in group]
        world_size = dist.get_world_size()
        shards = [num_shards(each) for each in self.parameters]
        self._has_sharded = any(is_dtensor(each) for each in self.parameters)
        self._squares = TensorSquares([each * pp / world_size for each in shards], device)
        self._masks = group_masks(groups, self.parameters, device)
        self.contributions = torch.zeros(len(self.parameters), dtype=torch.float64, device=device)

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Return this rank's contribution of each of `parameters`, and keep it as `contributions`."""
        gradients = [each.grad for each in self.parameters]
        if self._has_sharded:
            pairs = zip(self.parameters, gradients, strict=True)
            gradients = [None if gradient is None else local_gradient(each) for each, gradient in pairs]
        self.contributions = self._squares.measure(gradients)
        return self.contributions

    @torch.no_grad()
    def group_squares(self) -> Tensor:
        """Return this rank's contribution to the squared norm of each group, from the last `measure`."""
        masks, squares = self._masks, self.contributions
        return squares.sum(0, keepdim=True) if len(masks) == 1 else sum_by_mask(squares, masks)


def group_masks(
    groups: Sequence[Sequence[nn.Parameter]], parameters: Sequence[nn.Parameter], device: torch.device
) -> Tensor:
    """Return a table [groups, parameters] on `device` that says which parameter is in which group."""
    column = {id(each): number for number, each in enumerate(parameters)}
    masks = torch.zeros(len(groups), len(parameters), dtype=torch.bool)
    for row, group in enumerate(groups):
        masks[row, [column[id(each)] for each in group if id(each) in column]] = True
    return to_device(masks, device)


def sum_by_mask(values: Tensor, masks: Tensor) -> Tensor:
    """Return the sum of the values in each group of `group_masks`. A NaN or Inf stays in its group."""
    return torch.where(masks, values, 0.0).sum(1)  # not a matmul: its order of summation depends on the device


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the local shard of a parameter's gradient.

    A partial gradient (of a norm that saw some of the positions) is reduced first.
    """
    gradient = parameter.grad
    assert gradient is not None
    if not is_dtensor(gradient):
        assert not is_dtensor(parameter), "a gradient is sharded as its parameter is"
        return gradient
    assert is_dtensor(parameter)
    if gradient.placements == parameter.placements:
        return gradient.to_local()
    with AXIS_WAITS.span("tp"):  # data ranks have reduced theirs by now
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()


def num_shards(parameter: Tensor) -> int:
    """Return the number of shards of a parameter; each rank holds one."""
    if not is_dtensor(parameter):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())
