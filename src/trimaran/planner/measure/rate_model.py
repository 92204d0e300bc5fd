"""What is fitted: the rates of a device and its links, and the steps of earlier runs that they should predict."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Literal

from trimaran.core import Plan, UserError
from trimaran.cost import NON_LAYER_PRECISION, Job, StepTime, predict, rate_name, rates_of, step_time_of
from trimaran.machine import MAX_FACTOR, MIN_FACTOR, Cluster, FittedRates, LinkFactors, machine_name, with_fitted
from trimaran.models import outline_if_known, spec_of
from trimaran.planner import Question
from trimaran.planner.measure.measured_run import MeasuredRun, PlanSteps, UnusableRunError
from trimaran.planner.measure.run_index import layout_of

Kind = Literal["matmul", "bandwidth", "host", "memory", "latency"]
# How far each kind of rate is expected to be from what is assumed or measured: the standard deviation of its logarithm.
# A data sheet bounds what a device computes; networks, hosts and what shares them differ by factors.
PRIOR_SIGMA: dict[Kind, float] = {"matmul": 0.3, "bandwidth": 0.7, "host": 0.7, "memory": 0.3, "latency": 0.7}
# The cost model's own error for a step, and for one of its phases, which is larger: what overlaps is split by rules.
STEP_SIGMA, PHASE_SIGMA = {"cuda": 0.02, "cpu": 0.05}, 0.15
MIN_MEASURED_SHARE, MIN_PREDICTED_SHARE = 0.05, 0.02  # of a phase that says something, in its step
SLOWED = "computing slowed by collectives"  # in `Prediction.exposed`; a run measures it in forward and backward


@dataclass(frozen=True, slots=True)
class Parameter:
    """A rate: of matmuls in the precision `name`, of the link `name`, or of memory and host."""

    kind: Kind
    name: str = ""

    def __str__(self) -> str:
        words = {"matmul": f"{self.name} matmuls", "memory": "memory", "host": "host"}
        return words.get(self.kind) or f"{self.name} {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A plan and the seconds of its step, without waiting for data."""

    label: str
    job: Job
    cluster: Cluster
    plan: Plan
    seconds: float
    sigma: float  # expected error of the logarithm of the seconds
    phases: Mapping[str, float]  # `compute`, `comm`, `optimizer`, where both count them alike


def parameters_of(observations: Iterable[Observation]) -> list[Parameter]:
    """Return the rates that the steps could depend on."""
    found: dict[Parameter, None] = {}
    for each in observations:
        rate = rate_name(each.cluster.device, each.plan.precision)
        rate = rate if rate in each.cluster.device.peak_flops else "fp32"
        found |= dict.fromkeys(Parameter("matmul", name) for name in (rate, NON_LAYER_PRECISION.get(rate, rate)))
        if each.cluster.world_size > 1:
            for link in each.cluster.levels:
                found |= dict.fromkeys((Parameter("bandwidth", link.name), Parameter("latency", link.name)))
    return sorted([*found, Parameter("memory"), Parameter("host")], key=lambda each: list(PRIOR_SIGMA).index(each.kind))


def factors_of(values: Mapping[Parameter, float]) -> FittedRates:
    """Return the factors on rates for the logarithms of the parameters."""
    factors = {each: math.exp(value) for each, value in values.items()}
    links = {each.name for each in factors if each.kind in ("bandwidth", "latency")}
    return FittedRates(
        matmul={each.name: factor for each, factor in factors.items() if each.kind == "matmul"},
        memory=factors.get(Parameter("memory"), 1.0),
        host=factors.get(Parameter("host"), 1.0),
        links={
            name: LinkFactors(
                bandwidth=factors.get(Parameter("bandwidth", name), 1.0),
                latency=factors.get(Parameter("latency", name), 1.0),
            )
            for name in links
        },
    )


def bounds_of(parameter: Parameter, observations: Sequence[Observation]) -> tuple[float, float]:
    """Return the least and the largest logarithm of a parameter. No matmul is faster than the data sheet says."""
    low, high = math.log(MIN_FACTOR) + 1e-6, math.log(MAX_FACTOR) - 1e-6
    devices = {each.cluster.device.name: each.cluster.device for each in observations}
    for device in devices.values():
        if parameter.kind == "matmul" and not device.no_peak:
            rates = rates_of(device, parameter.name)
            high = min(high, max(0.0, math.log(device.peak(parameter.name) / rates.matmul_flops)))
    return low, high


def rate_of(parameter: Parameter, cluster: Cluster) -> tuple[float, str]:
    """Return a rate of the cluster, and its unit; 0 if the cluster has no such link."""
    device = cluster.device
    if parameter.kind == "matmul":
        return rates_of(device, parameter.name).matmul_flops / 1e12, "TFLOP/s"
    if parameter.kind == "memory":
        return device.stream_bandwidth / 1e9, "GB/s"
    if parameter.kind == "host":
        if not device.traits.runs_async:
            return (device.cpu_rates.layer_us, "us a layer") if device.cpu_rates else (0.0, "us a layer")
        return device.launch_seconds * 1e6, "us a launch"
    link = next((each for each in cluster.levels if each.name == parameter.name), None)
    if parameter.kind == "bandwidth":
        return (link.bandwidth / 1e9 if link else 0.0), "GB/s"
    return (link.latency * 1e6 if link else 0.0), "us"


class StepModel:
    """Predicts the seconds of observed steps. What was predicted once is remembered: a fit asks again and again."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        self._observations = list(observations)
        self._uses = [set(parameters_of([each])) for each in observations]
        # A nearly full device takes longer by a factor, which no rate changes.
        full = [predict(each.job, each.cluster, each.plan) for each in observations]
        self._crowded = [each.step_seconds / (each.step_seconds - each.time.get("allocator", 0.0)) for each in full]
        self._known: dict[tuple, dict[str, float]] = {}
        self._clusters: dict[tuple, Cluster] = {}

    def seconds(self, number: int, phase: str, values: Mapping[Parameter, float]) -> float:
        """Return the seconds of a phase of an observation, '' for its step, with the logarithms `values` of factors."""
        used = {each: value for each, value in values.items() if each in self._uses[number] and value}
        key = (number, *sorted((str(each), value) for each, value in used.items()))
        if key not in self._known:
            each = self._observations[number]
            time = step_time_of(each.job, self._cluster(each.cluster, used), each.plan)
            self._known[key] = {"": self._crowded[number] * sum(time.terms.values()), **phases_of(time)}
        return self._known[key][phase]

    def _cluster(self, cluster: Cluster, used: Mapping[Parameter, float]) -> Cluster:
        """Return the cluster with the factors; equal ones are the same, because the cost model caches by them."""
        key = (id(cluster), *sorted((str(each), value) for each, value in used.items()))
        if key not in self._clusters:
            self._clusters[key] = with_fitted(cluster, factors_of(used)) if used else cluster
        return self._clusters[key]


def phases_of(time: StepTime) -> dict[str, float]:
    """Return the predicted seconds of the phases of an observation."""
    slowed, terms = time.exposed.get(SLOWED, 0.0), time.terms
    return {
        "compute": terms["forward"] + terms["backward"] + slowed,
        "comm": max(0.0, terms["comm"] - slowed),
        "optimizer": terms["optimizer"],
    }


def telling_phases(measured: Mapping[str, float], plan: Plan, time: StepTime) -> dict[str, float]:
    """Return the measured phases of a step that say something about rates; `time` is the predicted step.

    Waiting in a pipeline is counted as another phase in a run than in a prediction, and so is communication inside
    compiled layers and in older runs.
    """
    mesh = plan.mesh
    is_split = mesh.tp * mesh.pp * mesh.cp * mesh.ep > 1
    if is_split or plan.offload != "none" or not plan.engine_traits.times_collectives:
        return {}
    found = {
        "compute": measured.get("forward", 0.0) + measured.get("backward", 0.0),
        "comm": measured.get("comm", 0.0),
        "optimizer": measured.get("optimizer", 0.0),
    }
    total, expected = sum(found.values()), phases_of(time)
    least = MIN_PREDICTED_SHARE * sum(time.terms.values())
    telling = (name for name, seconds in found.items() if seconds > MIN_MEASURED_SHARE * total)
    return {name: found[name] for name in telling if expected[name] > least}


MIN_TOKENS = 0.9  # of the positions of a step: with fewer, samples differ in length and so do steps
MAX_OBSERVATIONS = 48  # of a device: the latest of each plan

ClusterOf = Callable[[MeasuredRun, PlanSteps], Cluster]
"""Returns the cluster that a run used, with the rates that the planner takes for it now; raises UserError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """An observation, and the run that it comes from."""

    run: MeasuredRun
    found: PlanSteps
    observation: Observation

    @property
    def cluster(self) -> Cluster:
        return self.observation.cluster

    @property
    def device(self) -> str:
        """The name of the calibration's file: runs with the same one share their rates."""
        return machine_name(self.cluster)


def observe(run: MeasuredRun, cluster_of: ClusterOf) -> list[ObservedRun]:
    """Return the observations of a run, one for each plan; raise UnusableRunError with the reason if there are none."""
    found, reasons = [], []
    for each in run.plans:
        try:
            recipe, plan, steps = run.recipe, each.plan, each.steps
            cluster = cluster_of(run, each)
            if cluster.world_size != plan.mesh.world_size:
                ranks = plan.mesh.world_size
                raise UnusableRunError(f"its plan has {ranks} ranks, and {cluster} has {cluster.world_size}")
            outline = outline_if_known(recipe.model, recipe.data)
            if outline is None:
                raise UnusableRunError("nothing is known about its model's size")
            expected = plan.global_batch * outline.main.sample_positions(recipe.data.seq_len)[0]
            if steps.tokens < MIN_TOKENS * expected:
                filled = f"{steps.tokens / expected:.0%}"
                raise UnusableRunError(f"its steps have {filled} of the tokens that fit, so they are not all alike")
            job = Question(recipe=recipe, spec=spec_of(recipe.model), outline=outline, cluster=cluster).job
            time = step_time_of(job, cluster, plan)
            observation = Observation(
                label=f"{run.path.name}: {layout_of(plan)}",
                job=job,
                cluster=cluster,
                plan=plan.model_copy(update={"prediction": None}),
                seconds=steps.busy_seconds,
                sigma=math.hypot(STEP_SIGMA[cluster.device.kind], steps.standard_error),
                phases=telling_phases(steps.phases, plan, time),
            )
            found.append(ObservedRun(run=run, found=each, observation=observation))
        except (UserError, UnusableRunError) as error:
            reasons.append(error.what if isinstance(error, UserError) else str(error))
    if not found:
        raise UnusableRunError(reasons[0])
    return found


def latest_of_each_plan(found: Iterable[ObservedRun], limit: int = MAX_OBSERVATIONS) -> list[ObservedRun]:
    """Return at most `limit` runs: the latest of every plan, then the ones before."""
    plans: dict[tuple, list[ObservedRun]] = {}
    for each in sorted(found, key=lambda each: -each.found.steps.last_time):
        job = each.observation.job
        plans.setdefault((job, str(each.cluster), each.found.plan.model_dump_json()), []).append(each)
    rounds = chain.from_iterable(zip_longest(*plans.values()))
    return [each for each in rounds if each is not None][:limit]


def by_device(found: Sequence[ObservedRun]) -> dict[str, list[ObservedRun]]:
    """Return the runs by the device whose rates they share."""
    groups: dict[str, list[ObservedRun]] = {}
    for each in found:
        groups.setdefault(each.device, []).append(each)
    return groups
