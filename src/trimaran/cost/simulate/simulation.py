"""Simulates a plan on a cluster for days: its steps, then the job, then what spares and checkpoints are worth."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from trimaran.core import Plan
from trimaran.cost import Job
from trimaran.cost.goodput import best_interval, checkpoint_bytes, write_seconds
from trimaran.cost.roofline import rate_name
from trimaran.cost.simulate.job_history import DAY_SECONDS, JobHistory, JobTerms, SaveTerms, StepTimes, simulate_job
from trimaran.cost.simulate.step_costs import FULL_BANDWIDTH, Fabric, StepCosts, step_costs_of
from trimaran.cost.simulate.step_sample import NODE_JITTER, StepSample, node_speeds_of, sample_steps
from trimaran.cost.simulate.step_simulation import SimulatedStep, simulate_step
from trimaran.machine import Cluster

MICROSECONDS = 1e6
TRACKS = ("compute", "send", "gather", "reduce", "update")


def step_trace(step: SimulatedStep) -> dict[str, Any]:
    """Return one step: a process for each pipeline rank, with a track for passes, messages and each collective."""
    events = [event for rank in range(step.ranks) for event in _names(rank, f"pipeline rank {rank}", TRACKS)]
    for span in step.spans:
        if span.end > span.start:
            number = f" {span.micro_batch}" if span.micro_batch >= 0 else ""
            where = {"stage": span.stage} if span.stage >= 0 else {}
            events.append(_span(span.rank, TRACKS.index(span.track) + 1, f"{span.name}{number}", span.start, span.end)
                          | {"cat": span.track, "args": where})  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": events}


def job_trace(history: JobHistory) -> dict[str, Any]:
    """Return the job: one track of training and outages, each with its cause."""
    events = list(_names(0, "job", ("what it does",)))
    for each in history.segments:
        events.append(_span(0, 1, each.activity, each.start, each.end)
                      | {"cat": "job", "args": {"cause": each.cause, "step": each.step}})  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _span(process: int, track: int, name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": process, "tid": track, "ts": start * MICROSECONDS,
            "dur": (end - start) * MICROSECONDS}  # fmt: skip


def _names(process: int, name: str, tracks: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    ids = {"pid": process, "tid": 0}
    yield {"ph": "M", "name": "process_name", **ids, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", **ids, "args": {"sort_index": process}}
    for number, track in enumerate(tracks, start=1):
        ids = {"pid": process, "tid": number}
        yield {"ph": "M", "name": "thread_name", **ids, "args": {"name": track}}
        yield {"ph": "M", "name": "thread_sort_index", **ids, "args": {"sort_index": number}}


# An asynchronous save of Megatron's 405B on 8,960 GPUs stopped training for 0.59 s and was on disk after 51 s (Wan et
# al., "ByteCheckpoint", arXiv:2407.20143, table 8). Larger states take longer: see `save_seconds`.
MIN_STALL_SECONDS, MIN_WRITE_SECONDS = 0.6, 50.0
NODE_DISK_BANDWIDTH = 2e9  # bytes a second to a parallel file system, assumed, as `trimaran plan` does
FILE_SYSTEM_BANDWIDTH = 2e12  # bytes a second of all nodes: what Llama 3's file system sustained (arXiv:2407.21783)
NUM_SAMPLED_STEPS = 256
SPARE_SHORTAGE = 0.001  # how often all spares may be in use, if their number is chosen here
INTERVAL_FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)

Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is assumed about the job beyond its plan; None is chosen by the simulation."""

    days: float = 30.0
    seed: int = 0
    runs: int = 4  # how often the job is simulated, each time with other failures
    spares: int | None = None
    interval: float | None = None  # seconds between checkpoints
    restart: float = 600.0
    repair: float = DAY_SECONDS
    mtbf_hours: float | None = None  # mean hours between failures of one device; None: as in the Llama 3 run
    jitter: float = NODE_JITTER
    fabric: Fabric = FULL_BANDWIDTH


class Worth(NamedTuple):
    """The goodput with so many spares, or with so many steps between checkpoints: mean, and its standard error."""

    value: int
    goodput: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The answer: a step with equal nodes, the distribution of step times, the job, and what changes are worth."""

    plan: Plan
    cluster: Cluster
    scenario: Scenario
    costs: StepCosts
    step: SimulatedStep
    sample: StepSample
    flops_per_step: float
    peak_flops: float
    terms: JobTerms
    histories: tuple[JobHistory, ...]
    spares: tuple[Worth, ...] = ()
    intervals: tuple[Worth, ...] = ()

    @property
    def mfu(self) -> float:
        """Model FLOPs of a mean step by the peak of all devices that train; 0 if the peak is not known."""
        world = self.plan.mesh.world_size
        return self.flops_per_step / (self.sample.mean * self.peak_flops * world) if self.peak_flops else 0.0

    @property
    def goodput(self) -> float:
        return fmean(each.goodput for each in self.histories)

    @property
    def goodput_error(self) -> float:
        """The standard error of the goodput."""
        return _error([each.goodput for each in self.histories])

    @property
    def mttr(self) -> float:
        return fmean(each.mttr for each in self.histories)

    @property
    def steps(self) -> float:
        return fmean(each.steps for each in self.histories)


def simulate(
    job: Job, cluster: Cluster, plan: Plan, scenario: Scenario, report: Report = lambda what, fraction: None
) -> Simulation:
    """Return the simulation of a plan. `cluster` is what it runs on, without spares. `report` gets the progress."""
    report("simulating a step", 0.0)
    costs = step_costs_of(job, cluster, plan, scenario.fabric)
    step = simulate_step(costs)
    report("drawing steps", 0.1)
    sample = sample_steps(costs, step, node_speeds_of(cluster, plan.mesh, scenario.jitter),
                          count=NUM_SAMPLED_STEPS, seed=scenario.seed)  # fmt: skip
    terms = job_terms_of(job, cluster, plan, scenario, sample.mean)
    device = cluster.device
    simulation = Simulation(
        plan=plan, cluster=cluster, scenario=scenario, costs=costs, step=step, sample=sample, terms=terms,
        flops_per_step=plan.global_batch * job.outline.training_flops(job.seq_len),
        peak_flops=0.0 if device.no_peak else device.peak(rate_name(device, plan.precision)), histories=(),
    )  # fmt: skip
    report("simulating the job", 0.2)
    return replace(simulation, histories=tuple(simulate_runs(terms, sample, scenario)))


def with_worth(simulation: Simulation, report: Report = lambda what, fraction: None) -> Simulation:
    """Return the simulation with the goodput for other numbers of spares and other checkpoint intervals.

    Every variant meets the same failures, so that differences are those of the variant.
    """
    terms, done = simulation.terms, 0
    given = terms.spares  # and numbers around it, where the goodput bends
    around = {0, 1, given // 2, 3 * given // 4, given - 2, given - 1, given, given + 1, given + 2}
    spares = sorted(each for each in around if each >= 0)
    intervals = sorted({max(1, round(factor * terms.save.every)) for factor in INTERVAL_FACTORS})
    total = len(spares) + len(intervals)

    def worth(value: int, changed: JobTerms) -> Worth:
        nonlocal done
        report("trying other spares and intervals", 0.4 + 0.6 * done / total)
        done += 1
        found = [each.goodput for each in simulate_runs(changed, simulation.sample, simulation.scenario)]
        return Worth(value, fmean(found), _error(found))

    return replace(
        simulation,
        spares=tuple(worth(each, replace(terms, spares=each)) for each in spares),
        intervals=tuple(worth(each, replace(terms, save=replace(terms.save, every=each))) for each in intervals),
    )


def simulate_runs(terms: JobTerms, sample: StepSample, scenario: Scenario) -> Iterable[JobHistory]:
    """Yield the histories of the same job under different failures."""
    times = StepTimes(sample.seconds.tolist())
    for run in range(scenario.runs):
        yield simulate_job(terms, times, scenario.days * DAY_SECONDS, seed=scenario.seed + run)


def job_terms_of(job: Job, cluster: Cluster, plan: Plan, scenario: Scenario, step_seconds: float) -> JobTerms:
    """Return the terms of a job: what the scenario gives, and the rest chosen for it."""
    stall, write = save_seconds(job, cluster)
    terms = JobTerms(
        num_devices=plan.mesh.world_size,
        devices_per_node=cluster.devices_per_node,
        save=SaveTerms(every=1, stall=stall, write=write),
        restart=scenario.restart,
        repair=scenario.repair,
    )
    if scenario.mtbf_hours:
        terms = replace(terms, failure_scale=terms.mtbf / (scenario.mtbf_hours * 3600 / terms.num_devices))
    interval = scenario.interval
    if interval is None:
        best = best_interval(stall, terms.mtbf, restart=min(terms.restart, terms.mtbf))  # type: ignore[arg-type]
        interval = max(write, min(best, DAY_SECONDS))
    spares = spares_needed(terms) if scenario.spares is None else scenario.spares
    every = max(1, round(interval / step_seconds))
    return replace(terms, save=replace(terms.save, every=every), spares=spares)


def save_seconds(job: Job, cluster: Cluster) -> tuple[float, float]:
    """Return how long a checkpoint stops training, and how long until it is complete."""
    states = checkpoint_bytes(job.outline.trained_parameters, moment_bytes=job.state_bytes)
    stall = MIN_STALL_SECONDS + states / cluster.world_size / cluster.device.pcie_bandwidth
    bandwidth = min(FILE_SYSTEM_BANDWIDTH, NODE_DISK_BANDWIDTH * cluster.num_nodes)
    return stall, MIN_WRITE_SECONDS + write_seconds(states, disk_bandwidth=bandwidth)


def spares_needed(terms: JobTerms) -> int:
    """Return how many spares are all in use for less than SPARE_SHORTAGE of the time.

    Nodes in repair are a Poisson number: failures are independent, and so are repairs.
    """
    losing = sum(each.per_device_second for each in terms.failures if each.loses_node)
    mean = terms.failure_scale * terms.num_devices * losing * terms.repair
    term = below = math.exp(-mean)
    number = 0
    while below < 1 - SPARE_SHORTAGE and number < 10 * mean + 100:
        number += 1
        term *= mean / number
        below += term
    return number


def _error(values: list[float]) -> float:
    return pstdev(values) / math.sqrt(len(values) - 1) if len(values) > 1 else 0.0
