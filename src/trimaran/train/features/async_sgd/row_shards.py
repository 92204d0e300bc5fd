"""Which rows of each parameter each rank's server holds, and flat copies of them for the network."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class RowShard:
    """The rows of a parameter that one server holds; a scalar is one row."""

    name: str
    parameter: nn.Parameter
    rows: slice

    def view(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor of the parameter's shape."""
        return tensor[self.rows] if tensor.ndim else tensor

    @property
    def start(self) -> tuple[int, ...]:
        """Where the rows begin in the parameter, for each dim."""
        return tuple(self.rows.start if dim == 0 else 0 for dim in range(self.parameter.ndim))


class ServerRows:
    """The rows of all trained parameters on one server, and their flat form: one after another, in fp32, on the host.

    Servers get equal numbers of rows of each parameter, as far as that is possible.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], *, server: int, num_servers: int) -> None:
        shards = [RowShard(name, each, _rows(each, server, num_servers)) for name, each in named]
        self.shards = [each for each in shards if each.rows.start < each.rows.stop]
        self._sizes = [each.view(each.parameter).numel() for each in self.shards]

    @property
    def num_values(self) -> int:
        return sum(self._sizes)

    @torch.no_grad()
    def flat_gradients(self) -> Tensor:
        """Return the gradients of the rows; zeros for a parameter without one."""
        parts = [each.view(_gradient(each.parameter)).reshape(-1).float() for each in self.shards]
        return torch.cat(parts).cpu() if parts else torch.empty(0)

    @torch.no_grad()
    def fill_weights(self, flat: Tensor) -> None:
        """Copy these weights to the rows of the parameters."""
        if not self.shards:
            return
        targets = [each.view(each.parameter.detach()) for each in self.shards]
        values = flat.to(targets[0].device, non_blocking=True).split(self._sizes)
        sources = [value.view(target.shape) for value, target in zip(values, targets, strict=True)]
        torch._foreach_copy_(targets, sources)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return the flat tensor as a view for each of the rows."""
        shapes = [each.view(each.parameter).shape for each in self.shards]
        return [part.view(shape) for part, shape in zip(flat.split(self._sizes), shapes, strict=True)]


def _rows(parameter: Tensor, server: int, num_servers: int) -> slice:
    count = parameter.shape[0] if parameter.ndim else 1
    return slice(count * server // num_servers, count * (server + 1) // num_servers)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
