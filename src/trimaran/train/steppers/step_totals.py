"""The sums of a step over all ranks, in two small all-reduces: one before backward, one before the update."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.data import StepBatch
from trimaran.nets import Network
from trimaran.parallel import RankMesh
from trimaran.train.health.guard import MEMORY_CHANGED, Guard
from trimaran.train.loss.cross_entropy import later_loss_names, later_loss_sums
from trimaran.train.loss.objective import LossSums, Objective
from trimaran.train.metrics.router_stats import copy_to_host_async, router_details, routing_counts


class LossPartSums:
    """Adds up a step's loss parts on this rank. Losses of later tokens, of `networks`, are parts of their own."""

    def __init__(self, objective: Objective, ranks: RankMesh, networks: Sequence[Network] = ()) -> None:
        self._names, self._ranks = (*objective.part_names, *later_loss_names(networks)), ranks
        self._networks, num_parts = networks, len(objective.part_names)
        self._parts = torch.zeros(num_parts, 2, dtype=torch.float64, device=ranks.device) if num_parts else None

    def add(self, losses: LossSums) -> None:
        if self._parts is not None and losses.parts is not None:
            self._parts += losses.parts

    def sums(self, batch: StepBatch) -> Tensor | None:
        """Return this rank's loss parts and loader counts, flat; None if there are none.

        All ranks must have the same names in `batch.metrics`.
        """
        held = []
        if self._parts is not None:
            # The ranks of a tp group have the same loss. In a pipeline only the last stage has one.
            held.append((self._parts if self._ranks.rank("tp") == 0 else torch.zeros_like(self._parts)).flatten())
        if later_loss_names(self._networks):
            held.append(later_loss_sums(self._networks, self._ranks).flatten())
        if batch.metrics:
            counts = [float(each) if self._ranks.counts_samples else 0.0 for each in batch.metrics.values()]
            host = torch.tensor(counts, dtype=torch.float64, pin_memory=self._ranks.device_traits.has_own_memory)
            held.append(host.to(self._ranks.device, non_blocking=True))
        return torch.cat(held) if held else None

    def details(self, sums: Tensor | None, batch: StepBatch) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the `sums` of all ranks, added up, as metrics. Call it one step later."""
        if sums is None:
            return dict
        copy, names, keys, size = copy_to_host_async(sums), self._names, tuple(batch.metrics), 2 * len(self._names)

        def read() -> dict[str, Any]:
            on_host = copy()
            found: dict[str, Any] = {}
            if names:
                pairs = zip(names, on_host[:size].view(-1, 2).tolist(), strict=True)
                found["losses"] = {name: total / count for name, (total, count) in pairs if count}
            if keys:
                found["rows"] = dict(zip(keys, on_host[size:].tolist(), strict=True))
            return found

        return read


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedStep:
    """The sums of a step over all ranks.

    `numbers` is the result of `Stepper.step`. `squares` are squared gradient norms, if measured. `routing`: see
    `routing_counts`. Call `details`, the metrics of loss parts and routers, one step later. Replicas that train alone
    have numbers and squares of their own; `read_all` returns those of all, and what the update returned.
    """

    numbers: Tensor
    squares: Tensor | None
    details: Callable[[], dict[str, Any]]
    routing: Tensor | None = None
    read_all: Callable[[], list[float]] | None = None

    def numbers_later(self, norm: Tensor, refused: Tensor) -> Callable[[], list[float]]:
        if self.read_all is not None:
            return self.read_all
        read = copy_to_host_async(torch.cat([self.numbers, norm.reshape(1), refused.reshape(1)]))
        return lambda: read().tolist()


class StepTotals:
    """Sums the numbers of one step over all ranks; a single rank needs no collective.

    The all-reduce of the counts, which backward needs, overlaps the first forward. One more has all other sums, once
    the gradients are complete.
    """

    def __init__(self, batch: StepBatch, ranks: RankMesh, guard: Guard, *, requests: Sequence[int]) -> None:
        self._batch, self._ranks, self._guard = batch, ranks, guard
        counts = [batch.num_valid if ranks.counts_samples else 0, *requests, batch_checksum_term(batch, ranks)]
        # From pinned memory: otherwise the host would wait for the device.
        host = torch.tensor(counts, dtype=torch.int64, pin_memory=ranks.device_traits.has_own_memory)
        self._counts = host.to(ranks.device, non_blocking=True)
        self._is_alone = ranks.degrees.world_size == 1
        self._work = self._sum_counts()
        self._divisor: Tensor | None = None

    def _sum_counts(self) -> dist.Work | None:
        return None if self._is_alone else dist.all_reduce(self._counts, async_op=True)

    def num_valid(self) -> Tensor:
        """Return the number of valid tokens of the global batch, at least 1. The loss is divided by it."""
        if self._divisor is None:
            if self._work is not None:
                self._work.wait()
            self._divisor = self._counts[0].clamp(min=1)
        return self._divisor

    def reduce(
        self, loss: Tensor, parts: LossPartSums, networks: Sequence[Network], *, squares: Tensor | None = None
    ) -> ReducedStep:
        """Return the sums, given this rank's summed `loss`, its parts and its squared gradient norms (fp64)."""
        loss = loss.double().reshape(1)
        if self._ranks.rank("tp") > 0:  # the first tp rank has the same loss
            loss = torch.zeros_like(loss)
        here = [loss, self._flags(loss), parts.sums(self._batch), routing_counts(networks, self._ranks.device), squares]
        total, flags, part_sums, counts, squares = self._sum(here)
        assert total is not None
        assert flags is not None
        mean = total / self.num_valid()
        if (is_valid := self._is_valid(flags)) is not None:
            mean = torch.where(is_valid, mean, math.nan)
        part_details, routing_details = parts.details(part_sums, self._batch), router_details(counts, networks)
        numbers = torch.cat([mean, self._counts, flags])
        return ReducedStep(numbers=numbers, squares=squares, routing=counts,
                           details=lambda: routing_details() | part_details())  # fmt: skip

    def _sum(self, here: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the sums of flat tensors over all ranks; None stays None. There is one all-reduce for all of them."""
        if self._is_alone:
            return [*here]
        sums = torch.cat([each for each in here if each is not None])
        dist.all_reduce(sums)
        parts = iter(sums.split([len(each) for each in here if each is not None]))
        return [None if each is None else next(parts) for each in here]

    def _flags(self, loss: Tensor) -> Tensor:
        """Return for each rank 1 if its own loss is bad, plus MEMORY_CHANGED if its memory has changed."""
        changed = self._guard.shard_check.verify() if self._guard.shard_check else None
        flag = self._guard.suspects(loss, self._batch.num_valid)
        if changed is not None:
            flag = torch.add(flag, changed, alpha=MEMORY_CHANGED)
        if self._is_alone:
            return flag
        flags = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=loss.device)
        flags[dist.get_rank()] = flag[0]
        return flags

    def _is_valid(self, flags: Tensor) -> Tensor | None:
        """Return whether all ranks loaded what they should and no memory has changed; None if neither is checked."""
        checks = []
        if num_sharing(self._ranks) > 1:
            checks.append(self._counts[-1] == 0)
        if self._guard.shard_check is not None:
            checks.append((flags < MEMORY_CHANGED).all())
        return torch.stack(checks).all() if len(checks) > 1 else next(iter(checks), None)


def batch_checksum_term(batch: StepBatch, ranks: RankMesh) -> int:
    """Return a number whose sum over the ranks that share a batch is 0 if all loaded the same samples.

    A disk may fail on one rank only. It replaces the sample by one of the same shape, and replicated weights would
    diverge without a failure.
    """
    if num_sharing(ranks) == 1:
        return 0
    checksum = zlib.crc32(repr((batch.num_valid, [each.sample for each in batch.bad])).encode())
    return checksum * (num_sharing(ranks) - 1) if ranks.counts_samples else -checksum


def num_sharing(ranks: RankMesh) -> int:
    return ranks.degrees.world_size // ranks.degrees.dp
