"""Whole values of tensors that may be sharded."""

from collections.abc import Callable

from torch import Tensor

from trimaran.nets.local_shards import gathered

ReadTensor = Callable[[Tensor], Tensor]  # returns what a parameter or a buffer stands for: unsharded, on the CPU


def full_tensor(parameter: Tensor) -> Tensor:
    """Return the unsharded value on the CPU. A collective for sharded parameters."""
    return gathered(parameter.detach()).cpu().contiguous()
