"""Finds code that changes gradients between `loop.backward` and `loop.step`, where they are sums and no means."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class GradientWatch:
    """The gradients of parameters as the last backward has left them."""

    def __init__(self) -> None:
        self._records: list[tuple[nn.Parameter, Tensor, tuple[int, int]]] = []

    def record(self, parameters: Iterable[nn.Parameter]) -> None:
        self._records = [(each, each.grad, _version(each.grad)) for each in parameters if each.grad is not None]

    def forget(self) -> None:
        self._records = []

    def num_changed(self) -> int:
        """Return how many gradients have been written or replaced since `record`. Removed ones do not count."""
        kept = [each for each in self._records if each[0].grad is not None]
        return sum(parameter.grad is not grad or _version(grad) != version for parameter, grad, version in kept)


def local_tensor(gradient: Tensor) -> Tensor:
    """Return the part of a gradient that this rank holds."""
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _version(gradient: Tensor) -> tuple[int, int]:
    """Return how often a tensor has been written in place; torch counts that."""
    return gradient._version, local_tensor(gradient)._version
