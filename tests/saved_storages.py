"""What autograd keeps for backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def saved_storages() -> Iterator[dict[int, Tensor]]:
    """Yield a dict that fills with the tensors saved in forward, one for each storage, by its address."""
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor  # a reference keeps its address from being reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved
