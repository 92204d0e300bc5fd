"""Local steps: replicas update their weights alone, and an outer optimizer synchronises them now and then."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from trimaran.parallel.comm.outer_step import OuterStep, build_outer_step
from trimaran.train.features.replica_keys import OuterShards, ReplicaKeys
from trimaran.train.features.replica_totals import ReplicaTotals
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.steppers.feature import Feature, MakeTotals, ReadDetails, UpdateContext, UpdatePart


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

    def update_parts(self, context: UpdateContext) -> Sequence[UpdatePart]:
        outer_step = build_outer_step(context.plan, context.ranks, context.networks, last_step=context.train.steps)
        return () if outer_step is None else (OuterUpdate(outer_step, context.clock),)


FEATURE = LocalStepsFeature()
