"""H018: measures nodes in pairs, in two rounds, to find the nodes that are slow or silent with every partner."""

import math
from collections import Counter
from collections.abc import Iterable
from statistics import median

from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts, Pair, PairSeconds

INFO = CheckInfo("H018", "node pairs")
SLOW_PAIR_FACTOR = 1.5  # times the median of the faster pairs: then one of the two nodes is suspect
DOMINANT_CULPRIT_FACTOR = 3.0  # a node this many times slower than another bad node takes all the blame
MAX_NAMED_NODES = 4


def first_round(nodes: int) -> list[Pair]:
    """Return pairs of neighbours; with an odd count, the last node waits for the second round."""
    return [(node, node + 1) for node in range(0, nodes - 1, 2)]


def second_round(nodes: int, first: PairSeconds) -> list[Pair]:
    """Return each suspect, and each node that was not measured yet, paired with a healthy node.

    With few healthy nodes, one of them is paired several times, in the order of the list. If there are none, or no
    suspects, the first half is paired with the second half, so that all partners are new.
    """
    if nodes == 3:
        return [(0, 2), (1, 2)]
    bad = {node for pair in suspects(first) for node in pair}
    measured = {node for pair in first for node in pair}
    good = [node for node in range(nodes) if node in measured and node not in bad]
    undecided = [node for node in range(nodes) if node not in good]
    if not undecided or not good:
        half = nodes // 2
        return [(node, node + half) for node in range(half)]
    return [(node, good[index % len(good)]) for index, node in enumerate(undecided)]


def suspects(*rounds: PairSeconds) -> set[Pair]:
    """Return the pairs that failed, or took much longer than the median of the faster half."""
    times = sorted(seconds for each in rounds for seconds in each.values() if seconds is not None)
    usual = median(times[: max(1, (len(times) + 1) // 2)]) if times else 0.0
    can_compare = len(times) > 1
    return {
        pair
        for each in rounds
        for pair, seconds in each.items()
        if seconds is None or (can_compare and seconds > SLOW_PAIR_FACTOR * usual)
    }


def culprits(first: PairSeconds, second: PairSeconds) -> set[int]:
    """Return the nodes that were slow in every pair: with two partners, or with one that is healthy elsewhere.

    If one of them is far worse than the others, only that one counts: on a busy machine its partner, if it was
    interrupted once, would look bad twice. A second bad node shows up once the first is gone.
    """
    bad = suspects(first, second)
    healthy = {node for pair in (*first, *second) if pair not in bad for node in pair}
    bad_pairs = Counter(node for pair in bad for node in pair)
    beside_healthy = {node for pair in bad for node in pair if set(pair) - {node} <= healthy}
    found = {node for node, count in bad_pairs.items() if node not in healthy and (count > 1 or node in beside_healthy)}
    best = {node: min(_seconds(node, first, second)) for node in found}
    return {node for node in found if DOMINANT_CULPRIT_FACTOR * best[node] >= max(best.values())}


def _seconds(node: int, *rounds: PairSeconds) -> list[float]:
    """Return how long the node's pairs took; infinity for those that did not finish."""
    took = [each for seconds in rounds for pair, each in seconds.items() if node in pair]
    return [math.inf if each is None else each for each in took]


def check(facts: Facts) -> CheckResult:
    """Name the nodes that are slow or silent."""
    nodes = facts.node_measurements
    if nodes is None:
        return INFO.skipped("one node; for several: --nodes N --node I --address HOST:PORT on each of them")
    if nodes.missing:
        return INFO.fail(nodes.missing, "start the same command on every node, and check that they reach the address")
    if len(nodes.rounds) < 2:
        return INFO.skipped("the pairs were not measured")
    first, second = nodes.rounds[:2]
    bad, slow_pairs = sorted(culprits(first, second)), suspects(first, second)
    both = [*first.items(), *second.items()]
    times = [took for _, took in both if took is not None]
    evidence = {"rounds": [{"-".join(map(str, pair)): took for pair, took in each.items()} for each in (first, second)]}
    if not times:
        return INFO.fail("no two nodes could exchange a message", "check the network, the firewall and the address",
                         **evidence)  # fmt: skip
    if bad:
        worst = [took for pair, took in both if pair in slow_pairs and set(pair) & set(bad)]
        how = "does not answer" if None in worst else f"is {max(filter(None, worst)) / min(times):.1f} times slower"
        return INFO.fail(f"{_names(nodes.names, bad)} {how} with every partner; the other nodes are healthy",
                         f"leave {_names(nodes.names, bad)} out, and check its network card, cable and load",
                         culprits=[nodes.names[node] for node in bad], **evidence)  # fmt: skip
    if slow_pairs:
        return INFO.warn(f"{_names(nodes.names, min(slow_pairs))} were slow together, but fast with other nodes",
                         "check the link between them; if it was a passing load, a second run passes",
                         **evidence)  # fmt: skip
    ratio = max(times) / min(times)
    return INFO.passed(f"{len(nodes.names)} nodes, the slowest pair takes {ratio:.2f} times the fastest", **evidence)


def _names(names: tuple[str, ...], nodes: Iterable[int]) -> str:
    listed = [names[node] for node in nodes]
    more = f" and {len(listed) - MAX_NAMED_NODES} more" if len(listed) > MAX_NAMED_NODES else ""
    return " and ".join(listed[:MAX_NAMED_NODES]) + more
