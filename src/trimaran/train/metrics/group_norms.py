"""Norms of gradients and updates by group of modules, for any sharding of the parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.nets.local_shards import local_part
from trimaran.optim.split_weights import NO_SPLIT_WEIGHTS, SplitWeights
from trimaran.parallel.gradient_norm import GradientSquares, group_masks, num_shards, sum_by_mask
from trimaran.train.metrics.sampled_weights import SampledWeights

Groups = Mapping[str, Sequence[nn.Parameter]]


@dataclass(frozen=True, slots=True)
class UpdateSnapshot:
    """Taken before an update: squared gradient norms by group, and sampled values of this rank's weights."""

    gradients: Tensor
    weights: Tensor


class GroupMeter:
    """Measures every `every`-th update, starting with the first; 0 measures none. All ranks have the same groups.

    The update is measured on the weights, before and after, so it works for any optimizer and any format of its states.
    It does not copy all weights: large tensors are sampled. Each of `pp` stages is on the same number of ranks, as
    replicas or shards. A rank without parameters puts its zeros on `device`.
    """

    def __init__(
        self, groups: Groups, split: SplitWeights = NO_SPLIT_WEIGHTS, *, every: int, pp: int, device: torch.device
    ) -> None:
        self._every, self._pp, self._num_updates, self._groups = every, pp, 0, groups
        self._split = split
        self._device = next((each.device for group in groups.values() for each in group), device)  # may be offloaded
        self._gradients: GradientSquares | None = None

    @torch.no_grad()
    def begin(self, gradients: GradientSquares | None = None) -> UpdateSnapshot | None:
        """Return a snapshot before an update that is to be measured; None if it is not.

        `gradients` are those of all parameters of the groups, measured already; without it they are measured here.
        """
        self._num_updates += 1
        if not self._every or (self._num_updates - 1) % self._every:
            return None
        if gradients is None:
            gradients = GradientSquares([*self._groups.values()], pp=self._pp, device=self._device)
            gradients.measure()
        if gradients is not self._gradients:
            self._gradients = gradients
            self._gradient_masks = group_masks([*self._groups.values()], gradients.parameters, self._device)
        sums = sum_by_mask(gradients.contributions, self._gradient_masks)
        return UpdateSnapshot(sums, self._sampled.read())

    @torch.no_grad()
    def end(self, before: UpdateSnapshot | None, scale: float) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the norms of the update. Call it one step later.

        Gradients were multiplied by the loss scale `scale`.
        """
        if before is None:
            return dict
        now = self._sampled.read()
        squares = torch.stack([now - before.weights, now]).square_().sum(-1, dtype=torch.float64)
        squares *= self._sample_factors
        table = [before.gradients, *(sum_by_mask(each, self._sample_masks) for each in squares)]
        sums, names = all_reduce_to_host_async(torch.stack(table)), [*self._groups]

        def read() -> dict[str, Any]:
            rows = zip(names, *sums().sqrt().tolist(), strict=True)
            return {
                "groups": {
                    name: {"grad_norm": gradient / scale, "update_ratio": move / weight if weight else 0.0}
                    for name, gradient, move, weight in rows
                }
            }

        return read

    @cached_property
    def _held(self) -> list[nn.Parameter]:
        """This rank's parameters. A rank's shard of a small parameter may be empty."""
        return [each for group in self._groups.values() for each in group if local_part(each).numel()]

    @cached_property
    def _sampled(self) -> SampledWeights:
        return SampledWeights(self._held, self._device, self._split)

    @cached_property
    def _sample_masks(self) -> Tensor:
        return group_masks([*self._groups.values()], self._held, self._device)

    @cached_property
    def _sample_factors(self) -> Tensor:
        """For each parameter the number of its values per sampled value, over the number of its replicas."""
        num_ranks = dist.get_world_size() // self._pp
        factors = [
            local_part(each).numel() / size * num_shards(each) / num_ranks
            for each, size in zip(self._held, self._sampled.sizes, strict=True)
        ]
        return torch.tensor(factors, dtype=torch.float64).to(self._device)


def all_reduce_to_host_async(table: Tensor) -> Callable[[], Tensor]:
    """Start an all-reduce of `table`; return a function that waits for it and returns the sum on the CPU."""
    work = dist.all_reduce(table, async_op=True) if dist.get_world_size() > 1 else None
    copy, wait = table, work.wait if work is not None else lambda: True
    if table.is_cuda:
        if work is not None:
            work.wait()  # makes the stream wait, not the host
        copy, copied = table.to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record()
        wait = copied.synchronize

    def read() -> Tensor:
        wait()
        return copy

    return read
