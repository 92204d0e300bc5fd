"""Decides what follows from a step: whether the guard refused it, whether replicas differ, what the ranks requested."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trimaran.core import Plan
from trimaran.parallel.comm.json_exchange import broadcast_json
from trimaran.runs import Journal
from trimaran.train.agreement import StepDecision
from trimaran.train.health.guard import Guard, RefusedStep, Samples, StepNumbers
from trimaran.train.health.memory_check import MAX_REPORTED_KEYS, CompareReplicas

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The numbers of a step on the host, the same on every rank.

    `stop`, `save`, `profile` and `change`: whether any rank requested it. `loss_scaled`: the step used a loss scale.
    `rows`: the loader's counts, summed over all ranks.
    """

    numbers: StepNumbers
    stop: bool
    save: bool
    profile: bool
    change: bool
    loss_scaled: bool
    rows: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """Decides after every step, the same on every rank. Every rank calls every method, in the same order.

    `compare_replicas` finds differences between the weights of replicas, and `search` the origin of a NaN or Inf: it
    returns fields of the `skip` event.
    """

    plan: Plan
    guard: Guard
    journal: Journal
    compare_replicas: CompareReplicas
    search: Callable[[RefusedStep], dict[str, Any]] = lambda refusal: {}

    def decide(self, record: StepRecord, samples: Samples) -> StepDecision:
        """Return the decision after a step; write a `skip` event if it was refused."""
        refusal = self.guard.read(record.numbers, self.plan.mesh, samples, scaled=record.loss_scaled)
        if refusal is not None:
            log.warning("step %d was refused: %s", refusal.step, refusal.reason)
        if refusal is not None and refusal.memory_changed:
            self._report_changed_memory(refusal)
        elif refusal is not None:
            origin = self.search(refusal) if refusal.not_finite and not record.numbers.batches_differ else {}
            if self.journal.rank == 0:
                self.journal.event("skip", **refusal.as_dict(), **origin)
        bad_data = self.guard.bad_samples.too_many(record.rows)
        return StepDecision(
            stop=record.stop,
            save=record.save,
            profile=record.profile,
            change=record.change,
            bad_data=bad_data,
            refusal=refusal,
        )

    def _report_changed_memory(self, refusal: RefusedStep) -> None:
        """Write a `differ` event about memory that changed between two updates, with the tensors that it held."""
        shard_check, rank = self.guard.shard_check, refusal.ranks[0]
        mine = shard_check.changed_keys() if shard_check is not None and self.journal.rank == rank else []
        keys = broadcast_json(mine[:MAX_REPORTED_KEYS], src=rank)
        if self.journal.rank == 0:
            message = f"{refusal.reason}: {', '.join(keys[:2])}"
            facts = {"type": "MemoryChanged", "message": message, "cause": "numeric", "ranks": list(refusal.ranks)}
            self.journal.event("differ", step=refusal.step, **facts, keys=keys, since=refusal.good_step,
                               action=refusal.action)  # fmt: skip

    def replicas_in_sync(self, step: int) -> bool:
        """Whether all replicas should hold the same weights after `step` steps.

        With local steps, replicas train alone and synchronise every `comm.sync_every` steps. With fragments only the
        synchronised weights are the same then, and checkpoints hold the weights of each replica.
        """
        return step % self.plan.comm.sync_every == 0

    @property
    def read_delay(self) -> int:
        """After how many steps the numbers of a step are read."""
        return self.plan.comm.local.read_delay

    def check_replicas(self, step: int, decision: StepDecision) -> StepDecision:
        """Return `decision`, with a refusal if replicas differ after `step`; then also write a `differ` event."""
        difference = self.compare_replicas(step)
        if difference is None:
            return decision
        refusal = self.guard.on_replica_difference(difference)
        log.warning("step %d: %s", step, refusal.reason)
        if self.journal.rank == 0:
            self.journal.event("differ", step=step, **difference.as_dict(), action=refusal.action)
        return replace(decision, refusal=refusal)
