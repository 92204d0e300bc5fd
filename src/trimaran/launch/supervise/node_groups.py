"""Groups of nodes with fast links between them, from measured times of an exchange of each pair."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_FACTOR = 2.0  # a group's links are at least so many times as fast as those that leave it
Pair = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedNodes:
    """Nodes that were merged at `seconds`, the geometric mean of an exchange between its two `parts`."""

    nodes: tuple[str, ...]
    seconds: float = 0.0
    parts: tuple["MergedNodes", ...] = ()


def group_nodes(nodes: Sequence[str], seconds: Mapping[Pair, float]) -> dict[str, tuple[str, ...]]:
    """Return the groups that each node is in, from the largest; the groups have the form of switches.

    A group is named after its first node. Differences below `MIN_FACTOR` are noise and make no group. A pair without
    a time does not count; if two parts have no measured pair, they are as far apart as can be.
    """
    found: dict[str, tuple[str, ...]] = dict.fromkeys(nodes, ())
    if len(nodes) > 2:
        _add_groups(_merge(sorted(nodes), seconds), found)
    return found


def _add_groups(cluster: MergedNodes, found: dict[str, tuple[str, ...]]) -> None:
    """Add the groups inside of `cluster` to those of its nodes.

    Links inside of a part that are much faster than those between the parts make it a group of its own.
    """
    for part in cluster.parts:
        if part.parts and math.isfinite(part.seconds) and cluster.seconds >= MIN_FACTOR * part.seconds:
            for node in part.nodes:
                found[node] = (*found[node], min(part.nodes))
        _add_groups(part, found)


def _merge(nodes: Sequence[str], seconds: Mapping[Pair, float]) -> MergedNodes:
    """Return the tree of clusters that begins with single nodes and always merges the two closest."""
    clusters = [MergedNodes(nodes=(node,)) for node in nodes]
    while len(clusters) > 1:
        pairs = [(left, right) for index, left in enumerate(clusters) for right in clusters[index + 1 :]]
        left, right = min(pairs, key=lambda pair: _between(*pair, seconds))
        merged = MergedNodes(
            nodes=(*left.nodes, *right.nodes), seconds=_between(left, right, seconds), parts=(left, right)
        )
        clusters = [merged if each is left else each for each in clusters if each is not right]
    return clusters[0]


def _between(left: MergedNodes, right: MergedNodes, seconds: Mapping[Pair, float]) -> float:
    """Return the geometric mean over the pairs with one node in each: one interrupted measurement weighs little."""
    pairs = (frozenset((one, other)) for one in left.nodes for other in right.nodes)
    known = [math.log(seconds[pair]) for pair in pairs if pair in seconds]
    return math.exp(sum(known) / len(known)) if known else math.inf
