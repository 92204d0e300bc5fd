"""Norms of gradients and updates by group of modules, for any sharding of the parameters."""

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
from trimaran.optim.split_bf16 import join_fp32
from trimaran.parallel.gradient_norm import gradient_of, local_gradient

Groups = Mapping[str, Sequence[nn.Parameter]]
MIN_SAMPLED_VALUES = 2**10  # of a large tensor, enough to estimate the norm of its update


@dataclass(frozen=True, slots=True)
class UpdateSnapshot:
    """Taken before an update: squared gradient norms by group, and sampled values of this rank's weights, flat."""

    gradients: Tensor
    weights: Tensor


class GroupMeter:
    """Measures every `every`-th update, starting with the first; 0 measures none. All ranks have the same groups.

    The update is measured on the weights, before and after, so it works for any optimizer and any format of its states.
    It does not copy all weights: large tensors are sampled. Each of `pp` stages is on the same number of ranks, as
    replicas or shards. A rank without parameters puts its zeros on `device`.
    """

    def __init__(self, groups: Groups, *, every: int, pp: int, device: torch.device) -> None:
        self._every, self._pp, self._num_updates = every, pp, 0
        self._names = list(groups)
        held = [(group, each) for group, parameters in enumerate(groups.values()) for each in parameters]
        # A rank's shard of a small parameter may be empty.
        self._held = [(group, each) for group, each in held if local_part(each).numel()]
        self._device = next((each.device for _, each in held), device)  # weights may be offloaded

    @torch.no_grad()
    def begin(self) -> UpdateSnapshot | None:
        """Return a snapshot before an update that is to be measured; None if it is not."""
        self._num_updates += 1
        if not self._every or (self._num_updates - 1) % self._every:
            return None
        gradients = [None if gradient_of(each) is None else local_gradient(each)[0] for _, each in self._held]
        return UpdateSnapshot(self._group_sums(gradients, self._replica_factors), self._sample_weights())

    @torch.no_grad()
    def end(self, before: UpdateSnapshot | None, scale: float) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the norms of the update. Call it one step later.

        Gradients were multiplied by the loss scale `scale`.
        """
        if before is None:
            return dict
        now = self._sample_weights()
        samples = (each.split(self._sizes) for each in (now - before.weights, now))
        table = [before.gradients, *(self._group_sums(each, self._sample_factors) for each in samples)]
        sums, names = all_reduce_to_host_async(torch.stack(table)), self._names

        def read() -> dict[str, Any]:
            rows = zip(names, *sums().sqrt().tolist(), strict=True)
            return {
                "groups": {
                    name: {"grad_norm": gradient / scale, "update_ratio": move / weight if weight else 0.0}
                    for name, gradient, move, weight in rows
                }
            }

        return read

    def _sample_weights(self) -> Tensor:
        """Return sampled values of this rank's parameters, in fp32, concatenated."""
        return torch.cat([torch.empty(0, device=self._device), *(_values(each) for _, each in self._held)])

    def _group_sums(self, tensors: Sequence[Tensor | None], factors: Tensor) -> Tensor:
        """Return for each group the sum of the squared norms of `tensors`, one per parameter, times `factors`."""
        return (factors * self._squares(tensors)).sum(1)  # not a matmul: its order of summation depends on the device

    def _squares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the squared norm of each tensor, in fp64; 0 for None."""
        norms = [torch.zeros((), device=self._device)] * len(tensors)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, each in enumerate(tensors):
            if each is not None:
                by_dtype.setdefault(each.dtype, []).append(index)
        for dtype, indices in by_dtype.items():
            same_dtype = [each for each in map(tensors.__getitem__, indices) if each is not None]
            norms_of_dtype = torch._foreach_norm(same_dtype, 2.0, dtype=torch.promote_types(dtype, torch.float32))
            for index, norm in zip(indices, norms_of_dtype, strict=True):
                norms[index] = norm
        return torch.stack(norms).double().square() if norms else torch.zeros(0, device=self._device)

    @cached_property
    def _replica_factors(self) -> Tensor:
        """A table [groups, parameters]: 1 over the number of replicas of a parameter in its group, else 0."""
        num_ranks = dist.get_world_size() // self._pp
        table = torch.zeros(len(self._names), len(self._held), dtype=torch.float64)
        for column, (group, each) in enumerate(self._held):
            table[group, column] = _num_shards(each) / num_ranks
        return table.to(self._device)

    @cached_property
    def _sizes(self) -> list[int]:
        """The number of sampled values of each of this rank's parameters."""
        return [sample_values(local_part(each)).numel() for _, each in self._held]

    @cached_property
    def _sample_factors(self) -> Tensor:
        """As `_replica_factors`, times the number of values per sampled value."""
        held = zip(self._held, self._sizes, strict=True)
        values_per_sample = [local_part(each).numel() / size for (_, each), size in held]
        return self._replica_factors * torch.tensor(values_per_sample, dtype=torch.float64).to(self._device)


def sample_values(tensor: Tensor) -> Tensor:
    """Return values spread evenly over a tensor, flat: all of them, or at most twice MIN_SAMPLED_VALUES.

    The stride and the length of a row have no common factor; otherwise only some columns would be sampled.
    """
    stride, width = max(1, tensor.numel() // MIN_SAMPLED_VALUES), tensor.shape[-1] if tensor.ndim else 1
    if not tensor.is_contiguous():  # complete rows, because a flat view does not exist
        return tensor[:: min(stride, len(tensor))].flatten()
    while math.gcd(stride, width) > 1:
        stride += 1
    return tensor.view(-1)[::stride]


def all_reduce_to_host_async(table: Tensor) -> Callable[[], Tensor]:
    """Start an all-reduce of `table`; return a function that waits for it and returns the sum on the CPU."""
    work = dist.all_reduce(table, async_op=True)
    assert work is not None
    copy, wait = table, work.wait
    if table.is_cuda:
        work.wait()  # makes the stream wait, not the host
        copy, copied = table.to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record()
        wait = copied.synchronize

    def read() -> Tensor:
        wait()
        return copy

    return read


def _values(parameter: nn.Parameter) -> Tensor:
    """Return sampled values of this rank's shard, in fp32. A weight split in two bf16 halves is joined first."""
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    upper, low = sample_values(part), getattr(parameter, "low", None)
    return upper.float() if low is None else join_fp32(upper, sample_values(low))


def _num_shards(parameter: nn.Parameter) -> int:
    """Return the number of shards of a parameter; each rank holds one."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())
