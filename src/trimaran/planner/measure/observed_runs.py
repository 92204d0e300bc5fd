"""Turns measured runs into what rates are fitted to: the job, the cluster and the steps of each plan."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from trimaran.core import UserError
from trimaran.cost.step_time import step_time_of
from trimaran.machine import Cluster, machine_name
from trimaran.models import outline_if_known, spec_of
from trimaran.planner import Question
from trimaran.planner.measure.measured_plan import layout_of
from trimaran.planner.measure.measured_run import MeasuredRun, PlanSteps, UnusableRunError
from trimaran.planner.measure.rate_model import STEP_SIGMA, Observation, telling_phases

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
            found.append(ObservedRun(run=run, found=each, observation=_observation(run, each, cluster_of)))
        except UserError as error:
            reasons.append(error.what)
        except UnusableRunError as error:
            reasons.append(str(error))
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


def _observation(run: MeasuredRun, found: PlanSteps, cluster_of: ClusterOf) -> Observation:
    recipe, plan, steps = run.recipe, found.plan, found.steps
    cluster = cluster_of(run, found)
    if cluster.world_size != plan.mesh.world_size:
        raise UnusableRunError(f"its plan has {plan.mesh.world_size} ranks, and {cluster} has {cluster.world_size}")
    outline = outline_if_known(recipe.model, recipe.data)
    if outline is None:
        raise UnusableRunError("nothing is known about its model's size")
    expected = plan.global_batch * outline.main.sample_positions(recipe.data.seq_len)[0]
    if steps.tokens < MIN_TOKENS * expected:
        raise UnusableRunError(
            f"its steps have {steps.tokens / expected:.0%} of the tokens that fit, so they are not all alike"
        )
    job = Question(recipe=recipe, spec=spec_of(recipe.model), outline=outline, cluster=cluster).job
    time = step_time_of(job, cluster, plan)
    return Observation(
        label=f"{run.path.name}: {layout_of(plan)}",
        job=job,
        cluster=cluster,
        plan=plan.model_copy(update={"prediction": None}),
        seconds=steps.busy_seconds,
        sigma=math.hypot(STEP_SIGMA[cluster.device.kind], steps.standard_error),
        phases=telling_phases(steps.phases, plan, time),
    )


def by_device(found: Sequence[ObservedRun]) -> dict[str, list[ObservedRun]]:
    """Return the runs by the device whose rates they share."""
    groups: dict[str, list[ObservedRun]] = {}
    for each in found:
        groups.setdefault(each.device, []).append(each)
    return groups
