"""Elastic replicas as a feature: a replica trains as if it were alone, and its rows are dealt to it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from trimaran.data.feed import DataShare
from trimaran.data.row_ledger import RowLedger
from trimaran.train.features.elastic.dealt_loader import DealtLoader, dealt_data
from trimaran.train.features.elastic.elastic_outer import ElasticOuter, build_elastic_outer
from trimaran.train.features.elastic.replica import Replica
from trimaran.train.features.replica_keys import OuterShards, ReplicaKeys
from trimaran.train.inputs.training_data import TrainingData
from trimaran.train.steppers.feature import Feature, Load, LoadContext, MakeTrainer, UpdateContext, UpdatePart
from trimaran.train.trainer import Trainer

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
