"""Replicas that train alone for some steps: their checkpoint keys, their sums of a step, and the outer update."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.data import StepBatch
from trimaran.nets import Network, local_slices
from trimaran.parallel import OuterState, OuterStep, OuterTensor, RankMesh, TensorIndex, TensorShard, build_outer_step
from trimaran.train.checkpointing.training_state import OUTER_PREFIX, REPLICA_PREFIX, ShardKeys
from trimaran.train.health.guard import MEMORY_CHANGED, Guard
from trimaran.train.metrics.router_stats import copy_to_host_async, router_details, routing_counts
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.steppers.engine import StepperContext
from trimaran.train.steppers.feature import Feature, MakeTotals, ReadDetails, UpdatePart
from trimaran.train.steppers.step_totals import LossPartSums, ReducedStep, StepTotals

log = logging.getLogger(__name__)


class ReplicaKeys(ShardKeys):
    """Names the shards of a replica: replica 0 has the usual keys, others their own states under `replica-N/`.

    Weights are their own only if they still differ after a synchronisation. A replica that is not saved starts from
    replica 0.
    """

    def __init__(self, outer: OuterState) -> None:
        self._prefix = f"{REPLICA_PREFIX}{outer.replica}/" if outer.replica > 0 else ""
        self._own: tuple[str, ...] = ("optimizer/", f"{OUTER_PREFIX}error/")
        if outer.local.weights_stay_local:
            self._own += ("model/",)

    def named(self, shards: Iterable[TensorShard]) -> Iterator[TensorShard]:
        return (replace(shard, key=self.key(shard)) for shard in shards)

    def index_seen(self, index: TensorIndex) -> TensorIndex:
        """Return the index with this replica's own tensors in place of those of replica 0."""
        if not self._prefix:
            return index
        own = {key.removeprefix(self._prefix): each for key, each in index.items() if key.startswith(self._prefix)}
        return {key: each for key, each in index.items() if not key.startswith(REPLICA_PREFIX)} | own

    def found(self, shards: Iterable[TensorShard], index: TensorIndex) -> list[TensorShard]:
        """Return the shards under this replica's keys where the checkpoint has them, else under those of replica 0."""
        keyed = [(shard, self.key(shard)) for shard in shards]
        if self._prefix and not any(key in index for shard, key in keyed if key != shard.key):
            log.warning("the checkpoint has no state of %s: it starts from that of the first", self._prefix[:-1])
        return [replace(shard, key=key) if key in index else shard for shard, key in keyed]

    def key(self, shard: TensorShard) -> str:
        is_own = shard.key.startswith(self._own) and not shard.frozen
        return f"{self._prefix}{shard.key}" if is_own else shard.key


class OuterShards:
    """The outer state in a checkpoint, under `outer/weights/`, `outer/momentum/` and `outer/error/`."""

    def __init__(self, outer: OuterState, keys: ReplicaKeys) -> None:
        self._outer, self._keys = outer, keys
        self._loaded: set[str] = set()

    def shards(self) -> Iterator[TensorShard]:
        return self._keys.named(map(_outer_shard, self._outer.tensors()))

    def shards_from(self, index: TensorIndex) -> list[TensorShard]:
        shards = [shard for shard in self.shards() if shard.key in index]
        self._loaded = {shard.key for shard in shards}
        return shards

    def restore(self) -> None:
        self._outer.restore(lambda each: self._keys.key(_outer_shard(each)) in self._loaded)


def _outer_shard(each: OuterTensor) -> TensorShard:
    start = tuple(part.start for part in local_slices(each.parameter))
    key = f"{OUTER_PREFIX}{each.kind}/{each.name}"
    return TensorShard(key=key, tensor=each.tensor, shape=tuple(each.parameter.shape), start=start)


class ReplicaTotals(StepTotals):
    """Sums the numbers of a step over the ranks of this replica, and over all ranks for the metrics and decisions.

    Each replica divides its loss by its own tokens, clips by its own gradient norm, and refuses updates alone. The one
    sum over all ranks is read `LocalSteps.read_delay` steps later, so that it overlaps those steps. `replica` is None
    if a replica is one rank.
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
        own: Sequence[Tensor] = [loss, flags, squares]
        if self._replica is not None:
            sums = torch.cat([*own])
            dist.all_reduce(sums, group=self._replica)
            own = sums.split([len(each) for each in own])
        total, replica_flags, replica_squares = own
        mean = total / super().num_valid()
        if (is_valid := self._is_valid(replica_flags)) is not None:
            mean = torch.where(is_valid, mean, math.nan)
        replica_squares = replica_squares * self._ranks.degrees.dp_replicate  # `squares` are of a mean over replicas
        refused = self._guard.refuses(mean[0], replica_squares.sum().sqrt().float())
        here = {"loss": loss, "counts": self._own_counts, "flags": flags, "squares": squares,
                "refused": refused.double().reshape(1), "parts": parts.sums(self._batch),
                "routing": routing_counts(networks, self._ranks.device)}  # fmt: skip
        world = WorldSums(self._batch, self._ranks, {name: each for name, each in here.items() if each is not None})
        return ReducedStep(
            numbers=torch.cat([mean, self._counts, replica_flags]),
            squares=replica_squares,
            details=lambda: world.details(parts, networks),
            read_all=world.numbers,
        )


class WorldSums:
    """Named flat tensors, summed over all ranks by one all-reduce that nobody waits for until they are read."""

    def __init__(self, batch: StepBatch, ranks: RankMesh, here: dict[str, Tensor]) -> None:
        self._batch, self._here = batch, here
        self._wait: Callable[[], Tensor]
        self._sums: dict[str, Tensor] | None = None
        values = torch.cat([*here.values()])
        if ranks.degrees.world_size == 1:
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
        routing = router_details(sums.get("routing"), networks)
        return routing() | parts.details(sums.get("parts"), self._batch)()

    def _read(self) -> dict[str, Tensor]:
        if self._sums is None:
            parts = self._wait().split([len(each) for each in self._here.values()])
            self._sums = dict(zip(self._here, parts, strict=True))
        return self._sums


class OuterUpdate(UpdatePart):
    """Sums each step within this rank's replica, and takes the outer step after the updates at which it is due."""

    def __init__(self, outer_step: OuterStep, clock: StepClock) -> None:
        self._outer_step, self._clock = outer_step, clock
        self.keys = ReplicaKeys(outer_step)
        self.state = (OuterShards(outer_step, self.keys),)

    def wrap_totals(self, make: MakeTotals) -> MakeTotals:
        return partial(ReplicaTotals, replica=self._outer_step.ranks_of_replica)

    def after_update(self, step: int, refused: Tensor) -> ReadDetails:
        """Take the outer step if one is due. It counts as communication; the update before it as the optimizer's."""
        self._clock.lap("optimizer", then="comm")
        details = self._outer_step.after_update(step)
        self._clock.lap("comm", "dp_replicate", then="optimizer")
        return details


class LocalStepsFeature(Feature):
    """Replicas that synchronise their weights in place of their gradients."""

    def update_parts(self, context: StepperContext) -> Sequence[UpdatePart]:
        outer_step = build_outer_step(context.plan, context.ranks, context.networks, last_step=context.train.steps)
        return () if outer_step is None else (OuterUpdate(outer_step, context.clock),)


FEATURE = LocalStepsFeature()
