"""How large gradients and updates are, group by group of modules, however parameters are split."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimaran.nets.local_shards import local_part
from trimaran.optim.split_bf16 import join
from trimaran.parallel.gradient_norm import gradient_of, local_gradient

Groups = Mapping[str, Sequence[nn.Parameter]]
SAMPLED = 2**10  # values of a tensor that are enough to tell how far an update moved it


@dataclass(frozen=True, slots=True)
class Before:
    """What was seen before an update: the squares of the gradients by group, and values of all weights here, flat."""

    gradients: Tensor
    weights: Tensor


class GroupMeter:
    """Measures every `every`-th update, beginning with the first; 0: none. Every rank names the same groups.

    How far an update moved the weights is seen at the weights themselves, so it holds for any optimizer and any format
    of its states. No copy of all weights is made for that: of a large tensor some values stand for all. Of the network
    each of `pp` parts is on as many ranks, as copies or in shards. A rank that holds nothing has its zeros on `device`.
    """

    def __init__(self, groups: Groups, *, every: int, pp: int, device: torch.device) -> None:
        self._every, self._pp, self._num_updates = every, pp, 0
        self._names = list(groups)
        held = [(place, each) for place, group in enumerate(groups.values()) for each in group]
        # A rank may have nothing of a small parameter's shards.
        self._held = [(place, each) for place, each in held if local_part(each).numel()]
        self._device = next((each.device for _, each in held), device)  # weights may be offloaded

    @torch.no_grad()
    def begin(self) -> Before | None:
        """Return what there is to see before an update, if it is one to be measured."""
        self._num_updates += 1
        if not self._every or (self._num_updates - 1) % self._every:
            return None
        gradients = [None if gradient_of(each) is None else local_gradient(each)[0] for _, each in self._held]
        return Before(self._summed(gradients, self._copies), self._looked())

    @torch.no_grad()
    def end(self, before: Before | None, scale: float) -> Callable[[], dict[str, Any]]:
        """Return a reader of what the update did, for a step later. The gradients were `scale` times too large."""
        if before is None:
            return dict
        now = self._looked()
        seen = (each.split(self._sizes) for each in (now - before.weights, now))
        rows = [before.gradients, *(self._summed(each, self._shares) for each in seen)]
        arrived, names = summed_later(torch.stack(rows)), self._names

        def read() -> dict[str, Any]:
            told = zip(names, *arrived().sqrt().tolist(), strict=True)
            return {
                "groups": {
                    name: {"grad_norm": gradient / scale, "update_ratio": move / weight if weight else 0.0}
                    for name, gradient, move, weight in told
                }
            }

        return read

    def _looked(self) -> Tensor:
        """Return some values of every parameter here, fp32, one parameter after another."""
        return torch.cat([torch.empty(0, device=self._device), *(_values(each) for _, each in self._held)])

    def _summed(self, tensors: Sequence[Tensor | None], shares: Tensor) -> Tensor:
        """Return for each group the sum of squared norms of tensors, one for each parameter here, times `shares`."""
        return (shares * self._squares(tensors)).sum(1)  # no product of matrices: its order may depend on the device

    def _squares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the squared norm of each tensor, fp64; 0 for what is not there."""
        norms = [torch.zeros((), device=self._device)] * len(tensors)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, each in enumerate(tensors):
            if each is not None:
                by_dtype.setdefault(each.dtype, []).append(place)
        for dtype, places in by_dtype.items():
            alike = [each for each in map(tensors.__getitem__, places) if each is not None]
            found = torch._foreach_norm(alike, 2.0, dtype=torch.promote_types(dtype, torch.float32))
            for place, norm in zip(places, found, strict=True):
                norms[place] = norm
        return torch.stack(norms).double().square() if norms else torch.zeros(0, device=self._device)

    @cached_property
    def _copies(self) -> Tensor:
        """For each group and each parameter here 1 over the ranks that hold the same; 0 for one of another group."""
        num_ranks = dist.get_world_size() // self._pp
        table = torch.zeros(len(self._names), len(self._held), dtype=torch.float64)
        for column, (group, each) in enumerate(self._held):
            table[group, column] = _num_parts(each) / num_ranks
        return table.to(self._device)

    @cached_property
    def _sizes(self) -> list[int]:
        """How many values are looked at of each parameter here."""
        return [sampled(local_part(each)).numel() for _, each in self._held]

    @cached_property
    def _shares(self) -> Tensor:
        """As `_copies`, times how many values each one that is looked at stands for."""
        held = zip(self._held, self._sizes, strict=True)
        stands_for = [local_part(each).numel() / size for (_, each), size in held]
        return self._copies * torch.tensor(stands_for, dtype=torch.float64).to(self._device)


def sampled(tensor: Tensor) -> Tensor:
    """Return values that are spread evenly over a tensor, flat: all, or up to twice SAMPLED of them.

    The stride shares no factor with the length of a row, or only some columns would ever be seen.
    """
    stride, width = max(1, tensor.numel() // SAMPLED), tensor.shape[-1] if tensor.ndim else 1
    if not tensor.is_contiguous():  # whole rows, since a view of all values does not exist
        return tensor[:: min(stride, len(tensor))].flatten()
    while math.gcd(stride, width) > 1:
        stride += 1
    return tensor.view(-1)[::stride]


def summed_later(table: Tensor) -> Callable[[], Tensor]:
    """Return what gives the sum of all ranks' tables, on the CPU. Nobody waits for it before."""
    work = dist.all_reduce(table, async_op=True)
    assert work is not None
    copy, arrive = table, work.wait
    if table.is_cuda:
        work.wait()  # the stream does, not the host
        copy, copied = table.to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record()
        arrive = copied.synchronize

    def read() -> Tensor:
        arrive()
        return copy

    return read


def _values(parameter: nn.Parameter) -> Tensor:
    """Return some of the parameter's values here, fp32, as they are. A weight in two halves is put together."""
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    upper, low = sampled(part), getattr(parameter, "low", None)
    return upper.float() if low is None else join(upper, sampled(low))


def _num_parts(parameter: nn.Parameter) -> int:
    """Return how many parts there are of a parameter, of which each rank holds one."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())
