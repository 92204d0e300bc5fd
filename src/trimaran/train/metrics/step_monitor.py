"""A step's numbers, once they have come from the device: the line in the metrics, and what all ranks make of them."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from trimaran.core import PHASES, Plan, StepMetrics
from trimaran.data.loader import Loader
from trimaran.data.loader_tuner import WAITING, WAITING_SECONDS
from trimaran.data.step_batch import StepBatch
from trimaran.run import Journal
from trimaran.train.agreement import Agreed
from trimaran.train.health.compilations import Compilations
from trimaran.train.health.guard import Guard, Numbers, Refusal
from trimaran.train.health.replica_check import ReplicaCheck
from trimaran.train.metrics.meters import Meters
from trimaran.train.metrics.profiler import Profiler
from trimaran.train.metrics.step_clock import Reading

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A step whose numbers are still on their way: what `Stepper.step` returned, and behind it what `update` did."""

    step: int
    lr: float
    numbers: Tensor
    reading: Reading
    details: Callable[[], dict[str, Any]]
    loads: Mapping[str, Any] = field(default_factory=dict)  # what `Loader.facts` said
    tokens: int = 0  # valid ones that this rank has loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMonitor:
    """Reads steps, one after another. Every rank reads every step, and comes to the same answer."""

    plan: Plan
    meters: Meters
    journal: Journal
    guard: Guard
    profiler: Profiler
    replica_check: ReplicaCheck | None = None  # DeepSpeed keeps its weights where nobody else can look at them
    compilations: Compilations = field(default_factory=Compilations)
    search: Callable[[Refusal], dict[str, Any]] = lambda refusal: {}  # where a step that is not finite went wrong

    def note(self, batch: StepBatch, loader: Loader) -> None:
        """File what could not be used of this rank's samples of a step, and if they are loaded in a new way since."""
        self.compilations.mark(batch.step)  # the step before has done all that the host does for it
        for change in loader.changes[-1:]:
            if change.step == batch.step + 1:  # with a batch comes one change at most
                now = {"workers": change.setting.workers, "depth": change.setting.depth, "pinned": change.setting.pin}
                self.journal.event("loader", step=change.step, **now, reason=change.reason)
        for each in batch.bad:
            log.warning("step %d: sample %d is left out: %s", batch.step + 1, each.sample, each.reason)
            self.journal.event("bad_sample", step=batch.step + 1, sample=each.sample, reason=each.reason)

    def read(self, pending: Pending, loader: Loader) -> Agreed:
        """Write the step's metrics; return what all ranks agreed on with it."""
        phases = dict.fromkeys(PHASES, 0.0) | pending.reading()  # waits for that step's marks, so the numbers are there
        loss, tokens, stop, save, profile, apart, *bad, norm, refused = pending.numbers.tolist()
        details = pending.details()
        suspects = tuple(rank for rank, each in enumerate(bad) if each) if refused else ()
        numbers = Numbers(
            step=pending.step, loss=loss, grad_norm=norm, refused=refused > 0, suspects=suspects, apart=apart != 0
        )
        refusal = self.guard.read(numbers, self.plan.mesh, loader.samples, scaled="loss_scale" in details)
        if refused:
            details["skipped"] = True
        if left_out := loader.num_quarantined(pending.step - 1):
            details["quarantined"] = left_out
        unused = details.pop("unused", [])  # parameters of this rank
        details |= waited(pending.loads, phases) | self._compiled(pending.step, phases, unused)
        # Of samples only the answers have targets; what was read is more.
        self._write(pending, numbers, round(details.get("rows", {}).get("tokens", tokens)), phases, details)
        if refusal is not None:
            log.warning("step %d was refused: %s", refusal.step, refusal.reason)
            born = self.search(refusal) if refusal.not_finite and not numbers.apart else {}
            told: dict[str, Any] = refusal.as_dict() | ({"born": born} if born else {})
            if self.journal.rank == 0:
                self.journal.event("skip", **told)
        bad_data = self.guard.tally.too_many(details.get("rows", {}))
        return Agreed(stop=stop > 0, save=save > 0, profile=profile > 0, bad_data=bad_data, refusal=refusal)

    def _compiled(self, step: int, phases: Mapping[str, float], unused: list[str]) -> dict[str, int]:
        """File what was compiled in the step, if that is news, and what had no gradient in the first one; return what
        its metrics say."""
        for late in self.compilations.read(step):
            log.warning("step %d: %s was compiled again: %s", step, late.what, late.why)
            self.journal.event("recompile", step=step, what=late.what, why=late.why)
        if self.compilations.is_first(step):
            facts = {"seconds": sum(phases.values()), "phases": dict(phases), "compile": self.compilations.facts()}
            facts |= {"unused": unused} if unused else {}
            self.journal.event("started", step=step, **facts)
        return self.compilations.details

    def compare(self, step: int, agreed: Agreed) -> Agreed:
        """Return what all ranks agreed on, with the news that replicas differ after `step`, if they do."""
        difference = self.replica_check.check(step) if self.replica_check else None
        if difference is None:
            return agreed
        refusal = self.guard.part(difference)
        log.warning("step %d: %s", step, refusal.reason)
        if self.journal.rank == 0:
            self.journal.event("differ", step=step, **difference.as_dict(), action=refusal.action)
        return replace(agreed, refusal=refusal)

    def _write(
        self, pending: Pending, numbers: Numbers, tokens: int, phases: dict[str, float], details: dict[str, Any]
    ) -> None:
        seconds = sum(phases.values())
        peak_bytes, measured = self.meters.read(pending.step, lr=pending.lr, tokens=pending.tokens, phases=phases)
        prediction, world = self.plan.prediction, self.plan.mesh.world_size
        peak = prediction.device_peak_flops * world if prediction else 0.0
        metrics = StepMetrics(
            step=pending.step,
            loss=numbers.loss,
            grad_norm=numbers.grad_norm,
            lr=pending.lr,
            tokens=tokens,
            samples=self.plan.global_batch,
            step_seconds=seconds,
            mfu=prediction.flops_per_step / (seconds * peak) if prediction and peak else 0.0,
            peak_bytes=peak_bytes,
            phases=phases,
            time=time.time(),
            details=details | measured,
        )
        self.journal.step(metrics)
        log.info("step %d  loss %.4f  %.0f tokens/s", metrics.step, numbers.loss, metrics.tokens_per_second)


def waited(loads: Mapping[str, Any], phases: Mapping[str, float]) -> dict[str, Any]:
    """Return what the metrics tell of the loader: nothing, unless so much of the step went by that it looks for a way
    to load faster. The device may have had enough to do while the host waited: then that cost nothing."""
    lost = min(loads.get("last_seconds", 0.0), phases["data"])
    if lost <= max(WAITING * sum(phases.values()), WAITING_SECONDS):
        return {}
    return {"loader": {"workers": loads["workers"], "depth": loads["depth"], "waited": lost}}
