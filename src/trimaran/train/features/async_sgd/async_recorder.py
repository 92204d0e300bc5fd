"""Writes the metrics of updates: rank 0, one line for each update of the servers."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trimaran.core import PHASES, SECONDS_DECIMALS, Plan, StepMetrics
from trimaran.runs import Journal
from trimaran.runs.read.step_index import StepIndexer
from trimaran.train.features.async_sgd.shard_server import AppliedUpdate
from trimaran.train.health.compilations import Compilations
from trimaran.train.metrics.meters import MemoryMeter
from trimaran.train.metrics.step_recorder import SlowDetails

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRecorder:
    """Records updates one after another, on the main thread of rank 0.

    A line is an update with the tokens of a global batch, as in synchronous training. Its phases are the mean over its
    batches of the seconds that the workers took. While no worker is idle, n workers do n batches in the time of one
    update on average, whoever is faster: so the mean is the wall-clock time of an update.
    """

    plan: Plan
    journal: Journal
    memory: MemoryMeter
    indexer: StepIndexer | None
    compilations: Compilations
    slow_details: SlowDetails = field(default_factory=SlowDetails)

    def record(self, updates: Sequence[AppliedUpdate]) -> None:
        for each in updates:
            self._record_one(each)

    def _record_one(self, update: AppliedUpdate) -> None:
        if update.refusal is not None:
            log.warning("step %d was refused: %s", update.step, update.refusal.reason)
            self.journal.event("skip", **update.refusal.as_dict())
        phases = {
            phase: round(sum(each.seconds[number] for each in update.batches) / len(update.batches), SECONDS_DECIMALS)
            for number, phase in enumerate(PHASES)
        }
        self.compilations.end_step(update.step - 1)
        if self.compilations.is_first(update.step):
            facts = {"seconds": sum(phases.values()), "phases": phases, "compile": self.compilations.summary()}
            self.journal.event("started", step=update.step, **facts)
        peak, memory = self.memory.read()
        seconds, prediction = max(sum(phases.values()), 1e-9), self.plan.prediction
        known = prediction is not None and prediction.mfu_is_known
        peak_flops = prediction.device_peak_flops * self.plan.mesh.world_size if prediction and known else 0.0
        details = {"memory": memory, "async_sgd": staleness_details(update)}
        metrics = StepMetrics(
            step=update.step,
            loss=update.loss,
            grad_norm=update.grad_norm,
            lr=update.lr,
            tokens=sum(each.tokens for each in update.batches),
            samples=self.plan.global_batch,
            step_seconds=seconds,
            mfu=prediction.flops_per_step / (seconds * peak_flops) if prediction and peak_flops else 0.0,
            peak_bytes=peak,
            phases=phases,
            time=update.time,
            details=self.slow_details.select(update.step, details | ({"skipped": True} if update.refused else {})),
        )
        self.journal.step(metrics)
        if self.indexer is not None:
            self.indexer.note_line()
        log.info("step %d  loss %.4f  %.0f tokens/s", metrics.step, update.loss, metrics.tokens_per_second)


def staleness_details(update: AppliedUpdate) -> dict[str, Any]:
    """Return the `async_sgd` field of a line: how stale the gradients were, and how many batches each worker did."""
    staleness = [each.staleness for each in update.batches]
    batches = Counter(str(each.worker) for each in update.batches)
    return {
        "staleness": sum(staleness) / len(staleness),
        "max_staleness": max(staleness),
        "batches": dict(sorted(batches.items())),
    }
