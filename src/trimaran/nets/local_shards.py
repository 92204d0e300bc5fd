"""The part of a parameter that this rank holds."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_part(parameter: Tensor) -> Tensor:
    """Return this rank's part of `parameter`, which shares its memory: writing to it writes the parameter."""
    with torch.no_grad():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    assert not local.is_meta, "call to_empty before filling the module"
    return local


def local_for_compute(parameter: Tensor) -> Tensor:
    """Return this rank's part of `parameter` for use in the forward, with gradients.

    Along a mesh axis that replicates this parameter, the gradient is a partial sum, and backward all-reduces it.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    placements = parameter.placements
    if not any(each.is_replicate() for each in placements):
        return parameter.to_local()
    partial = [Partial() if each.is_replicate() else each for each in placements]
    # The redistribute does nothing in forward; in backward it reduces the partial gradients.
    return parameter.redistribute(placements=placements).to_local(grad_placements=partial)


def local_slices(parameter: Tensor) -> tuple[slice, ...]:
    """Return the slice of each dimension of the full tensor that this rank holds."""
    shape, offset = tuple(parameter.shape), (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
