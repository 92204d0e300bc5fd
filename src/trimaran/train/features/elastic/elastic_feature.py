"""The outer state of an elastic replica, and its exchange: nothing changes before all replicas have all values."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import Plan
from trimaran.core.replica_sync import LocalSteps, synchronisation_bytes
from trimaran.data.feed import BatchFeed, DataShare
from trimaran.data.loader import Loader
from trimaran.data.row_ledger import Deal, RowLedger
from trimaran.data.text.token_feed import TokenFeed
from trimaran.nets import Network
from trimaran.parallel.comm.outer_step import (
    BucketExchange,
    OuterBucket,
    OuterTensor,
    exchange_of,
    split_fragments,
    start_over,
)
from trimaran.train.features.elastic.replica import Replica
from trimaran.train.features.outer_update import OuterShards, ReplicaKeys
from trimaran.train.inputs.training_data import TrainingData
from trimaran.train.steppers.feature import Feature, Load, LoadContext, MakeTrainer, UpdateContext, UpdatePart
from trimaran.train.trainer import Trainer


def dealt_data(data: TrainingData, ledger: RowLedger, replica: int, share: DataShare) -> TrainingData:
    """Return the training data of a replica: the rows that the ledger deals to it. Held-out data stay the same."""

    def training(quarantined: frozenset[int]) -> BatchFeed:
        feed = data.training(quarantined)
        assert isinstance(feed, TokenFeed), "elastic replicas train on text"
        return feed.with_share(ledger.dealt_share(replica, share))

    return replace(data, training=training)


class DealtLoader:
    """Opens the loader of a step, and keeps it open: batches that are loaded ahead stay right in a healthy run."""

    def __init__(self, ledger: RowLedger) -> None:
        self._ledger = ledger
        self._loader: Loader | None = None
        self._deal: Deal | None = None

    @contextmanager
    def open(self, loader_from: Callable[[int], AbstractContextManager[Loader]], step: int) -> Iterator[Loader]:
        """Yield the loader of the batches from `step` on. Another block continues with it."""
        deal = self._ledger.deal
        is_next = self._loader is not None and self._loader.next_step == step
        if not is_next or self._deal is None or not self._ledger.continues(self._deal):
            self.close()
            self._loader, self._deal = loader_from(step).__enter__(), deal
        assert self._loader is not None
        yield self._loader

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
        self._loader = None


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


SEED_STRIDE = 1_000_003  # between the random seeds of replicas, which drop different elements


class ElasticPart(UpdatePart):
    """The outer state of a replica, which is synchronised outside of its steps, and the rows that were consumed."""

    def __init__(self, outer: ElasticOuter, ledger: RowLedger) -> None:
        self.outer = outer
        self.keys = ReplicaKeys(outer)
        self.state = (OuterShards(outer, self.keys),)
        self.counters = {"rows": ledger}


class ElasticFeature(Feature):
    """A replica of an elastic run. The replica that leads a round writes metrics and checkpoints after it."""

    writes_lines = False

    def __init__(self, replica: Replica, ledger: RowLedger) -> None:
        self._number, self._ledger = replica.number, ledger
        self.loader = DealtLoader(ledger)
        self.seed_offset = replica.number * SEED_STRIDE

    def wrap_load(self, load: Load, context: LoadContext) -> Load:
        def load_dealt(share: DataShare) -> TrainingData:
            return dealt_data(load(share), self._ledger, self._number, share)

        return load_dealt

    def update_parts(self, context: UpdateContext) -> Sequence[UpdatePart]:
        return (ElasticPart(build_elastic_outer(context.plan, context.networks), self._ledger),)

    def wrap_trainer(self, make: MakeTrainer) -> MakeTrainer:
        """Return the constructor of a trainer that continues with the same loader."""

        def make_for_replica(**parts: Any) -> Trainer:
            loader_from = partial(self.loader.open, parts["loader_from"])
            return make(**parts | {"loader_from": loader_from})

        return make_for_replica
