"""Copies results of a step to the host without waiting for the device."""

from collections.abc import Callable

import torch
from torch import Tensor


def copy_to_host_async(tensor: Tensor) -> Callable[[], Tensor]:
    """Start a copy of the tensor to the CPU; return a function that waits for the copy and returns it."""
    copy = tensor.to("cpu", non_blocking=True)
    copied = torch.cuda.Event() if tensor.is_cuda else None
    if copied is not None:
        copied.record()

    def read() -> Tensor:
        if copied is not None:
            copied.synchronize()
        return copy

    return read
