"""The outer state of an elastic replica, and its exchange: nothing changes before all replicas have all values."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import Plan
from trimaran.core.replica_sync import LocalSteps, synchronisation_bytes
from trimaran.nets import Network
from trimaran.parallel.comm.outer_exchange import exchange_of
from trimaran.parallel.comm.outer_step import (
    BucketExchange,
    OuterBucket,
    OuterTensor,
    split_fragments,
    start_over,
)

Received = list[tuple[Tensor, Tensor | None]]
"""For each bucket, the mean of the replicas, and what a sparse exchange has not sent."""


@dataclass(frozen=True, slots=True)
class ElasticOuter:
    """The buckets of this rank's parameters and their outer state, in host memory. See `OuterState`.

    The replica that saves a checkpoint saves it under the usual keys, those of replica 0.
    """

    plan: Plan
    buckets: Sequence[OuterBucket]
    replica: int = 0

    @property
    def local(self) -> LocalSteps:
        return self.plan.comm.local

    def tensors(self) -> Iterator[OuterTensor]:
        return (each for bucket in self.buckets for each in bucket.tensors())

    @torch.no_grad()
    def restore(self, loaded: Callable[[OuterTensor], bool]) -> None:
        start_over(each for each in self.tensors() if not loaded(each))

    def exchange(self, group: dist.ProcessGroup) -> Received:
        """Return the means over the replicas of `group`. It changes no state, so that it can be repeated."""
        start, received = exchange_of(self.local, group), Received()
        before: BucketExchange | None = None
        for bucket in self.buckets:
            running = bucket.start(start)
            if before is not None:
                received.append((before.mean.finish(), before.error))
            before = running
        if before is not None:
            received.append((before.mean.finish(), before.error))
        return received

    @torch.no_grad()
    def take(self, received: Received) -> None:
        """Update the outer state and the weights from the means."""
        for bucket, (mean, error) in zip(self.buckets, received, strict=True):
            bucket.take(mean, error)

    @torch.no_grad()
    def forget_error(self) -> None:
        """Start without error feedback: what was received with a state is what another replica has not sent yet."""
        for each in self.tensors():
            if each.kind == "error":
                each.tensor.zero_()

    def exchanged_bytes(self, num_replicas: int) -> int:
        num_values = sum(bucket.num_values for bucket in self.buckets)
        return round(synchronisation_bytes(self.local, num_values, num_replicas))


def build_elastic_outer(plan: Plan, networks: Sequence[Network]) -> ElasticOuter:
    """Return the outer state of this rank's trained parameters. `plan` is that of the replica."""
    fragments = split_fragments(networks, 1, separate=plan.mesh.pp > 1)
    host = torch.device("cpu")
    return ElasticOuter(plan, [OuterBucket(named, plan.comm.local, host) for each in fragments for named in each])
