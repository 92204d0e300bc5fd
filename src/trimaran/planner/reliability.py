"""Prices the reliability of plans: new steps a second over weeks, with failures, checkpoints and spare nodes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from trimaran.core import Plan
from trimaran.cost import Scenario, job_terms_of, simulate, spares_needed
from trimaran.machine import Cluster
from trimaran.planner.hints import resized_cluster
from trimaran.planner.question import Question
from trimaran.planner.search.branch_and_bound import FoundPlan, mesh_key_of

PRICED_DAYS, PRICED_RUNS = 30.0, 2
LEAST_TRAINING_FRACTION = 0.85  # of the nodes; the others are spares
MAX_SPLIT = 1024  # tp x pp x cp of a plan that leaves spares


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """What a simulation of a plan found: goodput, spare nodes, steps between checkpoints, and seconds of a step."""

    goodput: float
    spares: int
    save_every: int
    step_seconds: float
    mttr: float

    @property
    def seconds_per_new_step(self) -> float:
        return self.step_seconds / self.goodput if self.goodput > 0 else math.inf


def reliability_of(plan: Plan, question: Question, cluster: Cluster) -> Reliability:
    """Return the reliability of a plan on a part of the question's cluster. Its other nodes are spares."""
    scenario = _scenario(question, spares=question.cluster.num_nodes - cluster.num_nodes)
    found = simulate(replace(question, cluster=cluster).job, cluster, plan, scenario)
    return Reliability(
        goodput=fmean(each.goodput for each in found.histories),
        spares=found.terms.spares,
        save_every=found.terms.save.every,
        step_seconds=found.sample.mean,
        mttr=found.mttr,
    )


def by_goodput(plans: Sequence[FoundPlan], question: Question, cluster: Cluster) -> list[tuple[float, FoundPlan]]:
    """Return the plans with their seconds per new step, the fewest first."""
    priced = [(reliability_of(each.plan, question, cluster).seconds_per_new_step, each) for each in plans]
    return sorted(priced, key=lambda each: (each[0], mesh_key_of(each[1].plan)))


def clusters_with_spares(question: Question) -> Iterator[Cluster]:
    """Yield the cluster, and some parts of it that leave spares and over which the batch can be split."""
    cluster, batch = question.cluster, question.recipe.train.global_batch
    yield cluster
    sizes = []
    for nodes in range(cluster.num_nodes - 1, int(LEAST_TRAINING_FRACTION * cluster.num_nodes), -1):
        # As many data ranks as divide the batch leave a usual product of other degrees.
        world = nodes * cluster.devices_per_node
        rest = inner = world // math.gcd(world, batch)
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1 and inner <= MAX_SPLIT:
            sizes.append(nodes)
    mesh = question.pins.mesh.model_copy(update={"dp_replicate": cluster.world_size})
    plan = Plan().model_copy(update={"mesh": mesh})
    needed = spares_needed(job_terms_of(question.job, cluster, plan, _scenario(question, spares=0), 1.0))
    enough = [nodes for nodes in sizes if nodes <= cluster.num_nodes - needed]
    for nodes in sorted({*sizes[:1], *enough[:1]}, reverse=True):
        yield resized_cluster(cluster, nodes, cluster.devices_per_node)


def _scenario(question: Question, spares: int) -> Scenario:
    return Scenario(days=PRICED_DAYS, runs=PRICED_RUNS, spares=spares, mtbf_hours=question.mtbf_hours)
