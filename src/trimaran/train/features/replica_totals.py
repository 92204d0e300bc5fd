"""The sums of a step of replicas that train alone: no replica waits for another before its update."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.data.step_batch import StepBatch
from trimaran.nets import Network
from trimaran.parallel import RankMesh
from trimaran.train.health.guard import MEMORY_CHANGED, Guard
from trimaran.train.metrics.host_copy import copy_to_host_async
from trimaran.train.metrics.router_stats import router_details, routing_counts
from trimaran.train.steppers.step_totals import LossPartSums, ReducedStep, StepTotals


class ReplicaTotals(StepTotals):
    """Sums the numbers of a step over the ranks of this replica, and over all ranks for the metrics and decisions.

    Each replica divides its loss by its own tokens, clips by its own gradient norm, and decides alone whether to refuse
    the update. The one sum over all ranks is read some steps later (`LocalSteps.read_delay`), so that it hides behind
    those steps. `replica` is None if a replica is one rank.
    """

    def __init__(
        self,
        batch: StepBatch,
        ranks: RankMesh,
        guard: Guard,
        *,
        requests: Sequence[int],
        replica: dist.ProcessGroup | None,
    ) -> None:
        self._replica = replica
        super().__init__(batch, ranks, guard, requests=requests)

    def _sum_counts(self) -> dist.Work | None:
        self._own_counts = self._counts.double()
        return None if self._replica is None else dist.all_reduce(self._counts, group=self._replica, async_op=True)

    def num_valid(self) -> Tensor:
        """Return the tokens of this replica times the number of replicas: the loss is divided by it."""
        return super().num_valid() * self._ranks.degrees.dp_replicate

    def reduce(
        self, loss: Tensor, parts: LossPartSums, networks: Sequence[Network], *, squares: Tensor | None = None
    ) -> ReducedStep:
        """See `StepTotals.reduce`. Mean loss and squared norms are those of this replica."""
        assert squares is not None, "only DeepSpeed measures no gradients, and it has no local steps"
        loss = loss.double().reshape(1)
        if self._ranks.rank("tp") > 0:  # the first tp rank has the same loss
            loss = torch.zeros_like(loss)
        flags = self._flags(loss)
        total, replica_flags, replica_squares = self._sum_in_replica([loss, flags, squares])
        mean = total / super().num_valid()
        if (is_valid := self._is_valid(replica_flags)) is not None:
            mean = torch.where(is_valid, mean, math.nan)
        replica_squares = replica_squares * self._ranks.degrees.dp_replicate  # `squares` are of a mean over replicas
        refused = self._guard.refuses(mean[0], replica_squares.sum().sqrt().float())
        world = WorldSums(self._batch, self._ranks)
        world.add("loss", loss)
        world.add("counts", self._own_counts)
        world.add("flags", flags)
        world.add("squares", squares)
        world.add("refused", refused.double().reshape(1))
        world.add("parts", parts.sums(self._batch))
        world.add("routing", routing_counts(networks, self._ranks.device))
        world.start()
        return ReducedStep(
            numbers=torch.cat([mean, self._counts, replica_flags]),
            squares=replica_squares,
            details=lambda: world.details(parts, networks),
            read_all=world.numbers,
        )

    def _sum_in_replica(self, here: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._replica is None:
            return here
        sums = torch.cat([*here])
        dist.all_reduce(sums, group=self._replica)
        return sums.split([len(each) for each in here])


class WorldSums:
    """Named flat tensors, summed over all ranks by one all-reduce that nobody waits for until they are read."""

    def __init__(self, batch: StepBatch, ranks: RankMesh) -> None:
        self._batch, self._ranks = batch, ranks
        self._here: dict[str, Tensor] = {}
        self._wait: Callable[[], Tensor] = lambda: torch.empty(0)
        self._sums: dict[str, Tensor] | None = None

    def add(self, name: str, values: Tensor | None) -> None:
        if values is not None:
            self._here[name] = values

    def start(self) -> None:
        values = torch.cat([*self._here.values()])
        if self._ranks.degrees.world_size == 1:
            self._wait = copy_to_host_async(values)
            return
        work: Any = dist.all_reduce(values, async_op=True)
        if values.is_cuda:  # a copy on the stream of the next step would wait for that step
            with torch.cuda.stream(torch.cuda.Stream()):
                work.wait()
                values.record_stream(torch.cuda.current_stream())
                self._wait = copy_to_host_async(values)
            return

        def wait() -> Tensor:
            work.wait()
            return values

        self._wait = wait

    def numbers(self) -> list[float]:
        """Return the numbers of `Stepper.step` and of `Stepper.update`, for all replicas together."""
        sums = self._read()
        flags, counts = sums["flags"].tolist(), sums["counts"].tolist()
        is_valid = counts[-1] == 0 and all(flag < MEMORY_CHANGED for flag in flags)
        loss = sums["loss"].item() / max(1.0, counts[0]) if is_valid else math.nan
        norm = math.sqrt(squares) if (squares := sums["squares"].sum().item()) >= 0 else math.nan
        return [loss, *counts, *flags, norm, float(sums["refused"].item() > 0)]

    def details(self, parts: LossPartSums, networks: Sequence[Network]) -> dict[str, Any]:
        sums = self._read()
        read_routing, read_parts = (
            router_details(sums.get("routing"), networks),
            parts.details(sums.get("parts"), self._batch),
        )
        return read_routing() | read_parts()

    def _read(self) -> dict[str, Tensor]:
        if self._sums is None:
            parts = self._wait().split([len(each) for each in self._here.values()])
            self._sums = dict(zip(self._here, parts, strict=True))
        return self._sums
