"""Finds code that changes gradients between `loop.backward` and `loop.step`, where they are sums and no means."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class GradientWatch:
    """The gradients of parameters as the last backward has left them."""

    def __init__(self) -> None:
        self._records: list[tuple[nn.Parameter, Tensor, int, Tensor | None]] = []

    def record(self, parameters: Iterable[nn.Parameter]) -> None:
        self._records = [
            (each, each.grad, each.grad._version, _size(each.grad)) for each in parameters if each.grad is not None
        ]

    def forget(self) -> None:
        self._records = []

    def num_changed(self) -> int:
        """Return how many gradients have been written or replaced since `record`, or all if all were removed."""
        if all(parameter.grad is None for parameter, *_ in self._records):
            return len(self._records)
        return sum(
            parameter.grad is not gradient or gradient._version != version or _is_other(gradient, size)
            for parameter, gradient, version, size in self._records
            if parameter.grad is not None
        )


def local_tensor(gradient: Tensor) -> Tensor:
    """Return the part of a gradient that this rank holds."""
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _size(gradient: Tensor) -> Tensor | None:
    """Return the norm: torch counts neither writes to `gradient.data` nor those of `_foreach` to DTensors."""
    return None if gradient.is_sparse else local_tensor(gradient).norm()


def _is_other(gradient: Tensor, size: Tensor | None) -> bool:
    if size is None:
        return False
    now = local_tensor(gradient).norm()
    return bool((now != size) & ~(now.isnan() & size.isnan()))
