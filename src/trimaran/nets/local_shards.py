"""Which part of a parameter this rank holds."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_part(parameter: Tensor) -> Tensor:
    """Return the memory of `parameter` that lives here; writing to it writes the parameter."""
    with torch.no_grad():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    assert not local.is_meta, "give the module memory with to_empty before filling it"
    return local


def computing_part(parameter: Tensor) -> Tensor:
    """Return what this rank computes with: its slice of `parameter`, or all of it. Gradients find their way back.

    Along an axis that splits other parameters and leaves this one whole, the gradient is this rank's summand, and the
    ranks add them up in backward.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    placements = parameter.placements
    if not any(each.is_replicate() for each in placements):
        return parameter.to_local()
    summands = [Partial() if each.is_replicate() else each for each in placements]
    # To where it is already: what counts is the way back, from summands to the sum.
    return parameter.redistribute(placements=placements).to_local(grad_placements=summands)


def local_slices(parameter: Tensor) -> tuple[slice, ...]:
    """Return where in the whole tensor, dimension by dimension, this rank's part lies."""
    shape, offset = tuple(parameter.shape), (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
