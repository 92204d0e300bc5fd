"""The outer state of an elastic replica, and its exchange: nothing changes before all replicas have all values."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import LocalSteps, Plan, synchronisation_bytes
from trimaran.data import BatchFeed, DataShare, Deal, Loader, RowLedger, TokenFeed
from trimaran.parallel import BucketExchange, OuterBucket, OuterTensor, exchange_of, split_fragments, start_over
from trimaran.train.features.elastic.replica import Replica
from trimaran.train.features.outer_update import OuterShards, ReplicaKeys
from trimaran.train.inputs.training_data import TrainingData
from trimaran.train.steppers.engine import StepperContext
from trimaran.train.steppers.feature import Feature, Load, LoadContext, MakeTrainer, UpdatePart
from trimaran.train.trainer import Trainer


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
    """The outer state of this rank's parameters, in host memory, saved under the keys of replica 0."""

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
            data = load(share)

            def training(quarantined: frozenset[int]) -> BatchFeed:
                feed = data.training(quarantined)
                assert isinstance(feed, TokenFeed), "elastic replicas train on text"
                return feed.with_share(self._ledger.dealt_share(self._number, share))

            return replace(data, training=training)

        return load_dealt

    def update_parts(self, context: StepperContext) -> Sequence[UpdatePart]:
        fragments = split_fragments(context.networks, 1, separate=context.plan.mesh.pp > 1)
        host, local = torch.device("cpu"), context.plan.comm.local
        buckets = [OuterBucket(named, local, host) for each in fragments for named in each]
        return (ElasticPart(ElasticOuter(context.plan, buckets), self._ledger),)

    def wrap_trainer(self, make: MakeTrainer) -> MakeTrainer:
        def make_for_replica(**parts: Any) -> Trainer:
            loader_from = partial(self.loader.open, parts["loader_from"])
            return make(**parts | {"loader_from": loader_from})

        return make_for_replica
