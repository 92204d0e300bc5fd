"""The least memory: the leanest plan of a space, and the smallest cluster on which anything fits."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from trimaran.core import Plan
from trimaran.cost.peak_memory import Memory
from trimaran.hardware import Cluster
from trimaran.planner.branch_and_bound import allowed, lean_plans
from trimaran.planner.evaluator import Evaluator
from trimaran.planner.question import Question
from trimaran.planner.space import Space

MOST_DEVICES = 16_384
MOST_TRIED = 16  # numbers of nodes, one after the other


class LeastMemory(NamedTuple):
    """A plan, what it holds, and how much that is of what there is; above 1 it does not fit."""

    strain: float
    plan: Plan
    memory: Memory


def leanest(space: Space, scales: Evaluator, *, enough: bool = False) -> LeastMemory | None:
    """Return the plan that needs least of what there is, or, where that is `enough`, the first that fits; else None."""
    best: LeastMemory | None = None
    for plan in lean_plans(space):
        memory = scales.memory(plan)
        strain = scales.strain(memory)
        lean = LeastMemory(strain, plan, memory)
        if (best is None or _need(lean) < _need(best)) and allowed(space, plan):
            best = lean
            if enough and strain <= 1:
                break
    return best


def _need(lean: LeastMemory) -> tuple[bool, float, int]:
    """Return what the leanest has least of: where the host lacks most, in every plan alike, the device still counts."""
    return lean.strain > 1, round(lean.strain, 2), lean.memory.device


def smallest_cluster(question: Question) -> Cluster | None:
    """Return the smallest cluster of the question's devices on which a plan fits; None where none of a kind does."""
    larger = [
        each for each in sizes(question.cluster, most=MOST_DEVICES) if each.world_size > question.cluster.world_size
    ]
    return first_that_fits(question, larger)


def first_that_fits(question: Question, clusters: Iterable[Cluster]) -> Cluster | None:
    """Return the first cluster on which a plan fits, or one between it and the last that failed; None if there is none.

    The clusters come smallest first, and more nodes have more room, as long as the batch splits over them: where that
    goes on far the middle is tried, and at the end every number of nodes.
    """
    fails = 0
    for cluster in clusters:
        if fits_on(question, cluster):
            break
        fails = cluster.num_nodes
    else:
        return None
    while cluster.num_nodes - fails > MOST_TRIED:
        middle = resized(cluster, (fails + cluster.num_nodes) // 2, cluster.devices_per_node)
        if fits_on(question, middle):
            cluster = middle
        else:
            fails = middle.num_nodes
    between = (resized(cluster, num, cluster.devices_per_node) for num in range(fails + 1, cluster.num_nodes))
    return next((each for each in between if fits_on(question, each)), cluster)


def fits_on(question: Question, cluster: Cluster) -> bool:
    """Return whether any plan fits on that cluster."""
    space = Space(replace(question, cluster=cluster))
    lean = leanest(space, Evaluator(space), enough=True)
    return lean is not None and lean.strain <= 1


def sizes(cluster: Cluster, *, most: int) -> Iterator[Cluster]:
    """Yield clusters of the same devices, smallest first: parts of a node, then nodes, in numbers that divide well."""
    node = (
        cluster.devices_per_node if cluster.num_nodes > 1 else max(cluster.devices_per_node, cluster.device.node_size)
    )
    yield from (resized(cluster, 1, each) for each in range(1, node) if node % each == 0)
    for num in range(1, most // node + 1):
        if num <= 8 or num == cluster.num_nodes or _smooth(num):
            yield resized(cluster, num, node)


def resized(cluster: Cluster, num_nodes: int, devices_per_node: int) -> Cluster:
    """Return so many of the cluster's devices. Its own links stay, as far as they reach, the last one to all."""
    world = num_nodes * devices_per_node
    inner = tuple(link for link in cluster.links if link.devices < world)
    outer = next(
        (link for link in cluster.links if link.devices >= world), cluster.links[-1] if cluster.links else None
    )
    links = (*inner, replace(outer, devices=world)) if outer else ()
    return replace(cluster, num_nodes=num_nodes, devices_per_node=devices_per_node, links=links)


def _smooth(num: int) -> bool:
    """Return whether the number is a power of two, or one and a half times that."""
    return num & (num - 1) == 0 or (num % 3 == 0 and (third := num // 3) & (third - 1) == 0)
