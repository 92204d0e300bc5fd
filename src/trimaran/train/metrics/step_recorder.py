"""Reads the numbers of a finished step from the device and writes its line in the metrics."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from trimaran.core import PHASES, SECONDS_DECIMALS, SLOW_DETAILS, WORLD, Plan, StepMetrics, comm_axes
from trimaran.data import MIN_WAIT_FRACTION, MIN_WAIT_SECONDS_PER_BATCH, Loader, StepBatch
from trimaran.nets import Network, is_dtensor
from trimaran.runs import Journal, StepIndexer
from trimaran.train.agreement import StepDecision, StepRecord
from trimaran.train.health.compilations import Compilations
from trimaran.train.health.guard import MEMORY_CHANGED, StepNumbers
from trimaran.train.metrics.meters import ConnectionWatch, Meters, utilisation
from trimaran.train.metrics.profiler import Profiler
from trimaran.train.metrics.step_clock import NO_HOST_TIME, HostTime, ReadSeconds

log = logging.getLogger(__name__)

NUM_COMPLETE_STEPS = 100  # the first after each start, whose lines have every detail
MAX_SLOW_BYTES_PER_STEP = 48  # on average, of the details in SLOW_DETAILS
MAX_GROUP_BYTES_PER_STEP = 20  # on average, of `groups`


class SlowDetails:
    """Selects the details of each line. With the other fields a line takes at most 500 bytes on average.

    A line has the details in `SLOW_DETAILS` if its step is a multiple of a power of two, which follows from their size.
    `groups` are written as often as they are measured, if that is not too often for their size.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._interval = 1
        self._groups_step: float = float("-inf")  # the last step with `groups`, and their size
        self._groups_bytes = 0

    def select(self, step: int, details: Mapping[str, Any]) -> dict[str, Any]:
        """Return the details to write for `step`."""
        self._num_steps += 1
        selected = dict(details)
        is_complete = self._num_steps <= NUM_COMPLETE_STEPS
        if is_complete or step % self._interval == 0:
            slow_bytes = _num_bytes({name: details[name] for name in SLOW_DETAILS if name in details})
            least = slow_bytes / MAX_SLOW_BYTES_PER_STEP
            power = 1
            while power < least:
                power *= 2
            self._interval = power
        if not is_complete and step % self._interval:
            selected = {name: value for name, value in details.items() if name not in SLOW_DETAILS}
        if "groups" in details:
            if (step - self._groups_step) * MAX_GROUP_BYTES_PER_STEP >= self._groups_bytes:
                self._groups_step, self._groups_bytes = step, _num_bytes({"groups": details["groups"]})
            elif not is_complete:
                del selected["groups"]
        return selected


def _num_bytes(details: Mapping[str, Any]) -> int:
    return len(json.dumps(details, separators=(",", ":"))) if details else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A step whose numbers are still being copied from the device. `read_numbers` is `Stepper.numbers_later`."""

    step: int
    lr: float
    read_numbers: Callable[[], list[float]]
    read_seconds: ReadSeconds
    read_details: Callable[[], dict[str, Any]]
    loader_stats: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0  # valid tokens that this rank has loaded
    host_time: HostTime = NO_HOST_TIME


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecorder:
    """Records each step: metrics line, events, profile on request. Every rank must: it takes collectives."""

    plan: Plan
    meters: Meters
    journal: Journal
    profiler: Profiler
    compilations: Compilations = field(default_factory=Compilations)
    axes: Mapping[str, bool] = field(default_factory=dict)  # of communication: whether all waits are measured
    indexer: StepIndexer | None = None  # on rank 0
    slow_details: SlowDetails = field(default_factory=SlowDetails)
    connections: ConnectionWatch | None = None

    def note_batch(self, batch: StepBatch, loader: Loader) -> None:
        """Write events for the bad samples in this rank's batch, and for a change of the loader's setting."""
        self.compilations.end_step(batch.step)  # the host has finished the step before
        if self.connections is not None:
            self.connections.check(batch.step)
        for change in loader.changes[-1:]:
            if change.step == batch.step + 1:  # there is at most one change per batch
                now = {"workers": change.setting.workers, "depth": change.setting.depth, "pinned": change.setting.pin}
                self.journal.event("loader", step=change.step, **now, reason=change.reason)
        for each in batch.bad:
            log.warning("step %d: sample %d is left out: %s", batch.step + 1, each.sample, each.reason)
            self.journal.event("bad_sample", step=batch.step + 1, sample=each.sample, reason=each.reason)

    def record(self, pending: PendingStep, loader: Loader) -> StepRecord:
        """Write the metrics line of the step and return its numbers."""
        measured, waits, _ = pending.read_seconds()  # waits for the device, so the numbers are copied
        phases = dict.fromkeys(PHASES, 0.0) | {name: round(each, SECONDS_DECIMALS) for name, each in measured.items()}
        loss, tokens, stop, save, profile, change, *others, norm, refused = pending.read_numbers()
        *rank_sums, batches_differ = others[: -self.plan.mesh.world_size]
        bad, details = others[-self.plan.mesh.world_size :], pending.read_details()
        numbers = StepNumbers(
            step=pending.step,
            loss=loss,
            grad_norm=norm,
            refused=refused > 0,
            suspects=tuple(rank for rank, each in enumerate(bad) if each % MEMORY_CHANGED) if refused else (),
            batches_differ=batches_differ != 0,
            corrupted=tuple(rank for rank, each in enumerate(bad) if each >= MEMORY_CHANGED),
            rank_sums=tuple(rank_sums),
        )
        if refused:
            details["skipped"] = True
        if num_quarantined := loader.num_quarantined(pending.step - 1):
            details["quarantined"] = num_quarantined
        unused = details.pop("unused", [])  # parameters of this rank without a gradient
        for late in self.compilations.take_late(pending.step):
            log.warning("step %d: %s was compiled again: %s", pending.step, late.what, late.why)
            self.journal.event("recompile", step=pending.step, what=late.what, why=late.why)
        if self.compilations.is_first(pending.step):
            facts = {"seconds": sum(phases.values()), "phases": dict(phases), "compile": self.compilations.summary()}
            facts |= {"unused": unused} if unused else {}
            self.journal.event("started", step=pending.step, **facts)
        details |= loader_wait(pending.loader_stats, phases) | self.compilations.metrics
        if self.axes:
            waited = {axis: waits.get(axis, 0.0) if is_measured else None for axis, is_measured in self.axes.items()}
            details["comm_seconds"] = waited
        details["host_seconds"] = pending.host_time.seconds
        if pending.host_time.is_limit:
            details["host_bound"] = True
        rows, seconds = details.get("rows", {}), sum(phases.values())
        peak_bytes, measured = self.meters.read(
            pending.step, lr=pending.lr, tokens=pending.tokens, phases=phases, rank_sums=numbers.rank_sums
        )
        metrics = StepMetrics(
            step=pending.step,
            loss=loss,
            grad_norm=norm,
            lr=pending.lr,
            tokens=round(rows.get("tokens", tokens)),  # of samples only answers are targets, and more tokens are read
            samples=self.plan.global_batch,
            step_seconds=seconds,
            mfu=utilisation(self.plan, seconds),
            peak_bytes=peak_bytes,
            phases=phases,
            time=time.time(),
            details=self.slow_details.select(pending.step, details | measured),
        )
        self.write(metrics)
        requests = StepDecision(stop=stop > 0, save=save > 0, profile=profile > 0, change=change > 0)
        return StepRecord(numbers=numbers, requests=requests, loss_scaled="loss_scale" in details, rows=rows)

    def write(self, metrics: StepMetrics) -> None:
        self.journal.step(metrics)
        if self.indexer is not None:
            self.indexer.note_line()
        log.info("step %d  loss %.4f  %.0f tokens/s", metrics.step, metrics.loss, metrics.tokens_per_second)


def loader_wait(stats: Mapping[str, Any], phases: Mapping[str, float]) -> dict[str, Any]:
    """Return the `loader` field of the metrics; nothing if the wait is too short for the loader to change its setting.

    A wait of the host costs nothing while the device is busy, so it counts only up to the time of the data phase.
    """
    seconds = min(stats.get("last_seconds", 0.0), phases["data"])
    if seconds <= max(MIN_WAIT_FRACTION * sum(phases.values()), MIN_WAIT_SECONDS_PER_BATCH):
        return {}
    return {"loader": {"workers": stats["workers"], "depth": stats["depth"], "waited": seconds}}


def measured_axes(plan: Plan, networks: Sequence[Network]) -> dict[str, bool]:
    """Return for each axis of the plan whether all its waits are measured.

    Compiled blocks run their collectives inside torch's code, and layers from elsewhere run those of DTensor. DeepSpeed
    has its own. Replicas of sharded weights reduce in the same call as the shards, so their wait is part of that axis.
    """
    measured = dict.fromkeys(comm_axes(plan), True)
    missing: list[str] = ["tp", "cp"] if plan.compile else []
    if not plan.engine_traits.times_collectives:
        missing += [axis for axis in measured if axis != WORLD]
    if plan.sharding != "none" and plan.mesh.shards > 1 and not plan.comm.local.is_on:
        missing.append("dp_replicate")
    if plan.mesh.tp > 1:
        from trimaran.parallel.axes.sharded_layers import computes_with_shards  # noqa: PLC0415  with tp it is imported

        for module in (each for network in networks for each in network.module.modules()):
            if isinstance(module, nn.Linear | nn.Embedding) and not computes_with_shards(module):
                sharded = (each for each in module.parameters(recurse=False) if is_dtensor(each))
                if any("tp" in (each.device_mesh.mesh_dim_names or ()) for each in sharded):
                    missing.append("tp")
    return {axis: axis not in missing for axis in measured}
