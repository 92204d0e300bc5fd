"""Decides what follows from a step: whether the guard refused it, whether replicas differ, what the ranks requested."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trimaran.core import Plan
from trimaran.run import Journal
from trimaran.train.agreement import StepDecision
from trimaran.train.health.guard import Guard, RefusedStep, Samples
from trimaran.train.health.replica_check import ReplicaCheck
from trimaran.train.metrics.step_recorder import StepRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """Decides after every step, the same on every rank. Every rank calls every method, in the same order.

    `replica_check` is None with DeepSpeed, whose weights it cannot read. `search` finds where a NaN or Inf came from.
    """

    plan: Plan
    guard: Guard
    journal: Journal
    replica_check: ReplicaCheck | None = None
    search: Callable[[RefusedStep], dict[str, Any]] = lambda refusal: {}

    def decide(self, record: StepRecord, samples: Samples) -> StepDecision:
        """Return the decision after a step; write a `skip` event if it was refused."""
        refusal = self.guard.read(record.numbers, self.plan.mesh, samples, scaled=record.loss_scaled)
        if refusal is not None:
            log.warning("step %d was refused: %s", refusal.step, refusal.reason)
            origin = self.search(refusal) if refusal.not_finite and not record.numbers.batches_differ else {}
            event: dict[str, Any] = refusal.as_dict() | ({"born": origin} if origin else {})
            if self.journal.rank == 0:
                self.journal.event("skip", **event)
        bad_data = self.guard.bad_samples.too_many(record.rows)
        return StepDecision(
            stop=record.stop, save=record.save, profile=record.profile, bad_data=bad_data, refusal=refusal
        )

    def replicas_in_sync(self, step: int) -> bool:
        """Whether all replicas should hold the same weights after `step` steps.

        With local steps, replicas train alone and average their weights every `comm.local_steps` steps.
        """
        return step % self.plan.comm.local_steps == 0

    def check_replicas(self, step: int, decision: StepDecision) -> StepDecision:
        """Return `decision`, with a refusal if replicas differ after `step`; then also write a `differ` event."""
        difference = self.replica_check.check(step) if self.replica_check else None
        if difference is None:
            return decision
        refusal = self.guard.on_replica_difference(difference)
        log.warning("step %d: %s", step, refusal.reason)
        if self.journal.rank == 0:
            self.journal.event("differ", step=step, **difference.as_dict(), action=refusal.action)
        return replace(decision, refusal=refusal)
