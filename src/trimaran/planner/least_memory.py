"""The plan of a space that needs the least memory, and the smallest cluster on which any plan fits."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from trimaran.core import Plan
from trimaran.cost.peak_memory import Memory
from trimaran.machine import Cluster
from trimaran.planner.question import Question
from trimaran.planner.search.branch_and_bound import is_legal, least_memory_plans
from trimaran.planner.search.evaluator import PlanEvaluator
from trimaran.planner.search.space import Space

MAX_DEVICES = 16_384
MAX_NODE_COUNTS_TRIED = 16  # one after the other


class LeastMemory(NamedTuple):
    """A plan, its memory, and the fraction of the available memory that it needs. Above 1 it does not fit."""

    memory_use: float
    plan: Plan
    memory: Memory


def least_memory_plan(space: Space, evaluator: PlanEvaluator, *, stop_at_fit: bool = False) -> LeastMemory | None:
    """Return the legal plan that needs the least of the available memory; None if there is none.

    With `stop_at_fit`, return the first plan that fits.
    """
    best: LeastMemory | None = None
    for plan in least_memory_plans(space):
        memory = evaluator.memory(plan)
        memory_use = evaluator.memory_use(memory)
        candidate = LeastMemory(memory_use, plan, memory)
        if (best is None or _rank(candidate) < _rank(best)) and is_legal(space, plan):
            best = candidate
            if stop_at_fit and memory_use <= 1:
                break
    return best


def _rank(candidate: LeastMemory) -> tuple[bool, float, int]:
    """Return the sort key of a plan. If all plans exceed the host alike, device memory decides."""
    return candidate.memory_use > 1, round(candidate.memory_use, 2), candidate.memory.device


def smallest_cluster(question: Question) -> Cluster | None:
    """Return the smallest cluster of the question's devices on which a plan fits; None if none does."""
    larger = [
        each
        for each in cluster_sizes(question.cluster, most=MAX_DEVICES)
        if each.world_size > question.cluster.world_size
    ]
    return first_that_fits(question, larger)


def first_that_fits(question: Question, clusters: Iterable[Cluster]) -> Cluster | None:
    """Return the first cluster on which a plan fits, or a smaller one after the last that failed; None if none fits.

    The clusters come smallest first. More nodes have more memory, as long as the batch splits over them: a long
    interval is bisected, and at the end every number of nodes is tried.
    """
    fails = 0
    for cluster in clusters:
        if fits_on(question, cluster):
            break
        fails = cluster.num_nodes
    else:
        return None
    while cluster.num_nodes - fails > MAX_NODE_COUNTS_TRIED:
        middle = resized_cluster(cluster, (fails + cluster.num_nodes) // 2, cluster.devices_per_node)
        if fits_on(question, middle):
            cluster = middle
        else:
            fails = middle.num_nodes
    between = (resized_cluster(cluster, num, cluster.devices_per_node) for num in range(fails + 1, cluster.num_nodes))
    return next((each for each in between if fits_on(question, each)), cluster)


def fits_on(question: Question, cluster: Cluster) -> bool:
    """Return whether any plan fits on that cluster."""
    space = Space(replace(question, cluster=cluster))
    best = least_memory_plan(space, PlanEvaluator(space), stop_at_fit=True)
    return best is not None and best.memory_use <= 1


def cluster_sizes(cluster: Cluster, *, most: int) -> Iterator[Cluster]:
    """Yield clusters of the same devices, smallest first: parts of a node, then round numbers of nodes."""
    node = (
        cluster.devices_per_node if cluster.num_nodes > 1 else max(cluster.devices_per_node, cluster.device.node_size)
    )
    yield from (resized_cluster(cluster, 1, each) for each in range(1, node) if node % each == 0)
    for num in range(1, most // node + 1):
        if num <= 8 or num == cluster.num_nodes or _is_round(num):
            yield resized_cluster(cluster, num, node)


def resized_cluster(cluster: Cluster, num_nodes: int, devices_per_node: int) -> Cluster:
    """Return a cluster of that size with the same devices and links. The outermost link joins all nodes."""
    world = num_nodes * devices_per_node
    inner = tuple(link for link in cluster.links if link.devices < world)
    outer = next(
        (link for link in cluster.links if link.devices >= world), cluster.links[-1] if cluster.links else None
    )
    links = (*inner, replace(outer, devices=world)) if outer else ()
    return replace(cluster, num_nodes=num_nodes, devices_per_node=devices_per_node, links=links, groups=())


def _is_round(num: int) -> bool:
    """Return whether the number is a power of two, or 1.5 times one."""
    return num & (num - 1) == 0 or (num % 3 == 0 and (third := num // 3) & (third - 1) == 0)
